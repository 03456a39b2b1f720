/** `dsec verify`: whether images are whole and undamaged. */
import { humanSize, isDsecError, messageOf, type Progress } from '#base';
import {
  type BlobStore,
  damagedManifest,
  listImages,
  openAnyImage,
  setAsideDamaged,
  type VerifyReport,
  verifyImage,
} from '#imagesvc';
import { verifyDiskLayers } from '../../disk-images/verify-disk-layers.ts';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { counted } from '../counted.ts';
import type { Output } from '../output.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

interface Options extends StoreOption, JsonOption {
  readonly all?: boolean;
  readonly repair?: boolean;
}

export const definition: CommandDefinition = {
  description:
    'Checks images: every byte of every blob against its digest, the chunk digests against the data, and the EROFS structure of every layer (every ' +
    'inode, folder, extent and attribute), or of the layers of a disk. Exits with 3 when something is wrong, and says in which blob. With --repair it deletes damaged blobs from the ' +
    'store; the names stay, and converting or pulling the image again brings the blobs back.',
  examples: [
    { line: 'dsec verify web:1', what: 'an image' },
    { line: 'dsec verify --all', what: 'every image of the store' },
    { line: 'dsec verify --repair web:1', what: 'set damaged blobs aside, before it is converted or pulled again' },
  ],
  json: 'an object, with several images or --all an array: `image`, `ok`, `layers`, `blobs`, `blobBytes`, `chunks`, `inodes`, `directories`, `files`, `links`, `extents`, `fileBytes`, `problemCount`, `problems` (`blob`, `problem`), `damaged` (digests), `repaired` (digests that were set aside)',
  configure(command, context) {
    const { output, progress, signal } = context;
    withJson(withStore(command))
      .argument('[images...]', 'names or digests')
      .option('--all', 'every image of the store')
      .option('--repair', 'delete damaged blobs, so that convert or pull brings them again')
      .action(async (names: string[], options: Options) => {
        if ((options.all ?? false) === names.length > 0) {
          throw fail('CLI_USAGE', { problem: 'name images, or give --all', program: 'dsec verify' });
        }
        const store = await openChosenStore(options);
        const wanted = options.all ? (await listImages(store)).map((image) => image.name) : names;
        if (wanted.length === 0 && !options.json) output.note(`no images in ${store.url}: nothing to verify`);
        const reports: (VerifyReport & { repaired?: readonly string[] })[] = [];
        for (const name of wanted) {
          signal.throwIfAborted();
          const report = await verifyNamed(store, name, progress);
          const repaired = options.repair ? await setAsideDamaged(store, report.damaged) : undefined;
          reports.push({ ...report, repaired });
          if (!options.json) await show(report, repaired, output);
        }
        if (options.json) await output.json(reports.length === 1 && !options.all ? reports[0] : reports);
        if (reports.some((report) => !report.ok)) context.exitCode = 3;
      });
  },
};

/** An image whose ref or manifest is damaged is reported like any other: one of them must not hide the rest. */
async function verifyNamed(store: BlobStore, name: string, progress: Progress): Promise<VerifyReport> {
  try {
    const image = await openAnyImage(store, name);
    const report = await verifyImage(store, image, { progress });
    // Of wrong bytes no more can be said.
    const found = report.ok ? await verifyDiskLayers(store, image) : [];
    if (found.length === 0) return report;
    return { ...report, ok: false, problemCount: found.length, problems: found };
  } catch (error) {
    if (!isDsecError(error) || error.exit !== 3) throw error;
    const refDamaged = error.code === 'STORE_REF_DAMAGED';
    const blob = refDamaged ? undefined : await damagedManifest(store, name);
    if (!refDamaged && blob === undefined) throw error;
    const problem = refDamaged ? messageOf(error) : `the manifest: ${messageOf(error)}`;
    const nothing = { inodes: 0, directories: 0, files: 0, links: 0, extents: 0, fileBytes: 0 };
    return {
      image: name,
      ok: false,
      layers: 0,
      blobs: blob === undefined ? 0 : 1,
      blobBytes: 0,
      chunks: 0,
      ...nothing,
      problemCount: 1,
      problems: [{ blob, problem }],
      damaged: blob === undefined ? [] : [blob],
    };
  }
}

async function show(report: VerifyReport, repaired: readonly string[] | undefined, output: Output): Promise<void> {
  const { image, ok, problems, problemCount, damaged, layers, inodes, blobs, blobBytes } = report;
  for (const { blob, problem } of problems)
    await output.line(`${image}: ${blob === undefined ? '' : `${blob}: `}${problem}`);
  const unlisted = problemCount - problems.length;
  if (unlisted > 0) await output.line(`${image}: and ${counted(unlisted, 'more problem')}`);
  const extent = [
    counted(layers, 'layer'),
    // Disks have none.
    ...(inodes > 0 ? [counted(inodes, 'inode')] : []),
    counted(blobs, 'blob'),
    humanSize(blobBytes),
  ].join(', ');
  await output.line(`${image}: ${ok ? 'ok' : 'DAMAGED'} (${extent})`);
  if (repaired !== undefined && repaired.length > 0) {
    await output.line(`${image}: set ${counted(repaired.length, 'damaged blob')} aside; now convert or pull it again`);
  } else if (repaired === undefined && damaged.length > 0) {
    output.note(`      run "dsec verify --repair ${image}", then convert or pull it again`);
  }
}
