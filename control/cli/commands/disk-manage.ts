/** `dsec disk create`, `ls`, `snapshot`, `restore`, `compact`, `pack-diff`, `export`, `rm`: the named disks of this machine. */
import { randomUUID } from 'node:crypto';
import { existsSync } from 'node:fs';
import type { Command } from 'commander';
import { humanSize, isDsecError } from '#base';
import {
  createNamedDisk,
  type DiskOrigin,
  diskFacts,
  diskFolder,
  disksFolder,
  exportQcow2,
  exportRaw,
  listDisks,
  type NamedSnapshot,
  type OpenDisk,
  readConfig,
  restoreDisk,
} from '#ublk-daemon';
import { createDiskFromImage } from '../../disk-images/disk-from-image.ts';
import { publishPacked, publishPoint } from '../../disk-images/publish-disk.ts';
import { storeLayerOpener } from '../../disk-layers.ts';
import { fail } from '../../errors.ts';
import { onDisk, removeUnattached } from '../../ublkd-service/disk-work.ts';
import { choice } from '../choice.ts';
import type { Context } from '../context.ts';
import {
  type LayerFormatOption,
  layerFormat,
  publishedJson,
  publishedText,
  withImageName,
  withLayerFormat,
} from '../disk-image-options.ts';
import { withExamples } from '../examples.ts';
import { parseSize } from '../size.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';
import { attachedDisks, attachedText } from './disk-attach.ts';

interface CreateOptions extends JsonOption, StoreOption {
  readonly lazy?: boolean;
  readonly size?: string;
  readonly from?: string;
  readonly ext4?: boolean;
  readonly mode: string;
}

interface SnapshotOptions extends JsonOption, StoreOption, LayerFormatOption {
  readonly name?: string;
}

interface PackOptions extends JsonOption, StoreOption, LayerFormatOption {
  readonly output?: string;
  readonly name?: string;
  readonly since?: string;
  readonly whole?: boolean;
  readonly tar?: boolean;
}

export function addManagement(command: Command, context: Context): void {
  addCreate(command, context);
  addList(command, context);
  addSnapshots(command, context);
  addWaysOut(command, context);
  addRemove(command, context);
}

function addCreate(command: Command, { output }: Context): void {
  const create = withExamples(
    command
      .command('create')
      .description(
        'Makes a disk: empty, with a new ext4 file system, of a raw or qcow2 file, or on top of the layers of an image of the store or of a ' +
          'config.v1.json. It takes room only for what is written to it. Layers of a remote store are read on demand (docs/disk-images.md).',
      ),
    [
      { line: 'dsec disk create work --size 64G', what: 'an empty one' },
      { line: 'dsec disk create data --size 10G --ext4', what: 'with an empty ext4' },
      { line: 'dsec disk create web --size 10G --from dir:./site', what: 'with an ext4 that holds a folder' },
      { line: 'dsec disk create vm --from qcow2:debian.qcow2 --size 64G', what: 'of an image, larger than it' },
      { line: 'dsec disk create vm2 --from debian:12', what: 'on top of an image of kind disk, at once' },
      { line: 'dsec disk create vm3 --from config:layers/config.v1.json', what: 'on top of OverlayBD layers' },
    ],
  );
  withJson(withStore(create))
    .argument('<name>', 'letters, digits, dot, dash and underscore')
    .option('--size <size>', 'of the device: 64G, 512MiB (default: that of --from)')
    .option('--from <source>', 'an image, raw:FILE, qcow2:FILE, dir:FOLDER (needs --size) or config:FILE')
    .option('--lazy', 'of an image: through the chunk cache also where the store is a folder')
    .option('--ext4', 'make an ext4 file system (needs --size)')
    .option('--mode <mode>', 'of the writable layer: log, or sparse (in place, no compaction)', 'log')
    .action(async (name: string, options: CreateOptions) => {
      const mode = choice('--mode', options.mode, ['log', 'sparse'] as const);
      const imageName = imageOf(options);
      const origin = imageName === undefined ? originOf(options) : undefined;
      const sizeBytes = options.size === undefined ? undefined : parseSize('--size', options.size);
      if (sizeBytes === undefined && imageName === undefined && (origin === undefined || origin.kind === 'ext4')) {
        throw fail('CLI_USAGE', { problem: 'an empty disk needs --size', program: 'dsec disk create' });
      }
      const openStoreLayer = storeLayerOpener();
      if (imageName === undefined) await createNamedDisk(name, { sizeBytes, origin, mode, openStoreLayer });
      else {
        const store = await openChosenStore(options);
        const how = { sizeBytes, mode, lazy: options.lazy, openStoreLayer };
        await createDiskFromImage(name, store, imageName, how).catch((error: unknown) => {
          const isMissing = isDsecError(error, 'CATALOG_NOT_FOUND') || isDsecError(error, 'STORE_NAME');
          if (!isMissing || !existsSync(imageName)) throw error;
          const problem = `--from ${imageName} is a path: say what it is, raw:, qcow2:, dir: or config:`;
          throw fail('CLI_USAGE', { problem, program: 'dsec disk create' });
        });
      }
      const made = (await listDisks()).find((disk) => disk.name === name);
      if (options.json) await output.json(made);
      else await output.line(`${name}: ${humanSize(made?.sizeBytes ?? 0)}, takes ${humanSize(made?.diskBytes ?? 0)}`);
    });
}

/** Whatever has none of the prefixes. */
function imageOf({ from, ext4 = false, lazy = false }: CreateOptions): string | undefined {
  const isImage = from !== undefined && !/^(raw|qcow2|dir|config):./.test(from);
  const problem = ext4 ? '--ext4 makes a new one: not with --from' : '--lazy is for images';
  if ((isImage && ext4) || (!isImage && lazy)) throw fail('CLI_USAGE', { problem, program: 'dsec disk create' });
  return isImage ? from : undefined;
}

function originOf({ from, ext4 = false }: CreateOptions): DiskOrigin | undefined {
  if (from === undefined) return ext4 ? { kind: 'ext4' } : undefined;
  if (ext4)
    throw fail('CLI_USAGE', { problem: '--ext4 makes a new one: not with --from', program: 'dsec disk create' });
  const [, kind = '', path = ''] = /^(raw|qcow2|dir|config):(.+)$/.exec(from) ?? [];
  if (!existsSync(path)) throw fail('CLI_INPUT_MISSING', { path });
  return kind === 'dir' ? { kind: 'ext4', folder: path } : { kind: kind as 'raw' | 'qcow2' | 'config', path };
}

function addList(command: Command, { output, signal }: Context): void {
  const list = withExamples(
    command.command('ls').alias('list').description('Lists the disks of this machine and their snapshots.'),
    [
      { line: 'dsec disk ls', what: 'what there is' },
      { line: "dsec disk ls --json | jq -r '.[].snapshots[].name'", what: 'the names of all snapshots' },
    ],
  );
  withJson(list).action(async (options: JsonOption) => {
    const attached = await attachedDisks(disksFolder(), signal);
    const disks = (await listDisks()).map((disk) => ({
      ...disk,
      attached: attached.find(({ kind, name }) => kind === 'disk' && name === disk.name),
    }));
    // What is attached and is no disk (any more) is shown too: it has to be detached some day.
    const others = attached.filter(({ kind, name }) => kind === 'file' || !disks.some((disk) => disk.name === name));
    if (options.json) return output.json([...disks, ...others.map((other) => ({ name: other.name, attached: other }))]);
    if (disks.length + others.length === 0) return output.note('there are no disks');
    await output.table(
      [
        { title: 'NAME' },
        { title: 'SIZE', right: true },
        { title: 'TAKES', right: true },
        { title: 'LAYERS', right: true },
        { title: 'ATTACHED' },
        { title: 'SNAPSHOTS' },
      ],
      disks.map(({ name, sizeBytes, diskBytes, layers, snapshots, attached: at }) => [
        name,
        humanSize(sizeBytes),
        humanSize(diskBytes),
        String(layers),
        at === undefined ? '' : attachedText(at),
        snapshots.map((snapshot) => snapshot.name).join(' '),
      ]),
    );
    for (const other of others) await output.line(`${other.name}: ${attachedText(other)}`);
    for (const { name, problem } of disks) if (problem !== undefined) output.note(`dsec: ${name}: ${problem}`);
  });
}

function addSnapshots(command: Command, { output, progress, signal }: Context): void {
  const snapshot = withExamples(
    command
      .command('snapshot')
      .description(
        'Keeps a disk as it is now under a name. It takes time by what was changed, not by what the disk holds; one that is attached is used on meanwhile.',
      ),
    [
      { line: 'dsec disk snapshot work before-upgrade', what: 'a point to come back to' },
      {
        line: 'dsec disk snapshot work --name team/work:2 --store s3://bucket/images',
        what: 'and an image, of which disks can be made elsewhere: only the new layer is sent',
      },
    ],
  );
  withJson(withLayerFormat(withImageName(snapshot), 'zstd'))
    .argument('<disk>', 'its name')
    .argument(
      '[snapshot]',
      'a name for the point; with --name one that is there is published (default there: the time)',
    )
    .action(async (name: string, given: string | undefined, options: SnapshotOptions) => {
      if (given === undefined && options.name === undefined) {
        throw fail('CLI_USAGE', { problem: 'name the point, or give --name', program: 'dsec disk snapshot' });
      }
      const openStoreLayer = storeLayerOpener();
      const zfile = layerFormat(options, 'image');
      const point = given ?? new Date().toISOString();
      const seal = async () => {
        const made = await onDisk(
          name,
          {
            async here(opened) {
              const sealed = await opened.snapshot(point);
              return { layer: sealed.path, uuid: sealed.uuid };
            },
            there: (service) => service.snapshot(name, point),
          },
          { openStoreLayer },
        );
        if (!options.json) await output.line(`${name}: snapshot ${point}`);
        return made;
      };
      if (options.name === undefined) {
        const made = await seal();
        if (options.json) await output.json({ disk: name, snapshot: point, ...made });
        return;
      }
      const store = await openChosenStore(options);
      let made: { layer?: string; uuid: string } | undefined;
      const sealUnlessThere = async () => {
        const known = await pointOf(name, point);
        made = known === undefined ? await seal() : { uuid: known.uuid };
        return (known ?? (await pointOf(name, point))!).layers;
      };
      const publish = { name: options.name, zfile, openStoreLayer, progress, signal };
      const published = await publishPoint(store, name, sealUnlessThere, publish);
      if (options.json) await output.json({ disk: name, snapshot: point, ...made, image: publishedJson(published) });
      else await output.line(publishedText(published));
    });
  const restore = withExamples(
    command
      .command('restore')
      .description(
        'Makes a new disk of a snapshot of another one, at once: they share the layers. Any number can be made of one.',
      ),
    [{ line: 'dsec disk restore work before-upgrade work-again', what: 'a disk as it was then' }],
  );
  withJson(restore)
    .argument('<disk>', 'whose snapshot')
    .argument('<snapshot>', 'its name')
    .argument('<new>', 'name of the new disk')
    .action(async (name: string, point: string, fresh: string, options: JsonOption) => {
      await restoreDisk(name, point, fresh, { openStoreLayer: storeLayerOpener() });
      if (options.json) await output.json({ disk: fresh, from: name, snapshot: point });
      else await output.line(`${fresh}: ${name} as of ${point}`);
    });
  const compact = withExamples(
    command
      .command('compact')
      .description(
        'Gives back the room that overwritten and discarded data of the writable layer takes, also while it is attached.',
      ),
    [{ line: 'dsec disk compact work', what: 'one disk' }],
  );
  withJson(compact)
    .argument('<disk>', 'its name')
    .action(async (name: string, options: JsonOption) => {
      const done = await onDisk(
        name,
        { here: ({ disk }) => disk.compact(), there: (service) => service.compact(name) },
        { openStoreLayer: storeLayerOpener() },
      );
      if (options.json) await output.json({ disk: name, ...done });
      else await output.line(`${name}: ${humanSize(done.reclaimedBytes)} given back`);
    });
}

function addWaysOut(command: Command, { output, progress, signal }: Context): void {
  const pack = withExamples(
    command
      .command('pack-diff')
      .description(
        'Writes what was changed as one OverlayBD layer: since the disk was made, since a snapshot, or the whole disk. The layer names the one that it ' +
          'lies on as its parent. With --name it is published as an image: the layers below, and this one. Of an attached disk it has what was written until now.',
      ),
    [
      { line: 'dsec disk pack-diff work -o changes.lsmt', what: 'all changes to what it was made of' },
      {
        line: 'dsec disk pack-diff work --since before-upgrade -o upgrade.tar --compress zstd --tar',
        what: 'for a registry',
      },
      { line: 'dsec disk pack-diff work --whole -o all.lsmt', what: 'everything, in one layer' },
      {
        line: 'dsec disk pack-diff work --name team/work:2',
        what: 'as an image on top of the one that it was made of',
      },
    ],
  );
  withJson(withLayerFormat(withImageName(pack), 'none; with --name zstd'))
    .argument('<disk>', 'its name')
    .option('-o, --output <file>', 'the layer; it must not be there')
    .option('--since <snapshot>', 'changes since that point')
    .option('--whole', 'the whole disk, without a parent')
    .option('--tar', 'in the tar that registries carry')
    .action(async (name: string, options: PackOptions) => {
      if ((options.output === undefined) === (options.name === undefined)) {
        throw fail('CLI_USAGE', { problem: 'give --output or --name', program: 'dsec disk pack-diff' });
      }
      if (options.since !== undefined && options.whole) {
        throw fail('CLI_USAGE', { problem: 'give --since or --whole, not both', program: 'dsec disk pack-diff' });
      }
      const openStoreLayer = storeLayerOpener();
      const zfile = layerFormat(options, options.name === undefined ? 'file' : 'image');
      const tar = options.tar === true || options.name !== undefined;
      const pack = (path: string) =>
        onDisk(
          name,
          {
            async here({ disk, facts }) {
              const uuid = randomUUID().toUpperCase();
              const layers = layersBelow(name, facts, options);
              return { uuid, ...(await disk.commitAbove(layers, path, { uuid, zfile, tar, signal })) };
            },
            there: (service) =>
              service.packDiff(name, {
                output: path,
                since: options.since,
                whole: options.whole,
                compress: zfile?.algorithm,
                blockSizeKiB: (zfile?.blockSize ?? 4096) / 1024,
                tar,
              }),
          },
          { signal, openStoreLayer },
        );
      if (options.name !== undefined) {
        const store = await openChosenStore(options);
        const below = layersBelow(name, diskFacts(await readConfig(diskFolder(name))), options);
        const publish = { name: options.name, zfile, openStoreLayer, progress, signal };
        const published = await publishPacked(store, name, below, pack, publish);
        if (options.json) await output.json({ disk: name, image: publishedJson(published) });
        else await output.line(publishedText(published));
        return;
      }
      const path = options.output!;
      refuseExisting(path);
      const made = await pack(path);
      if (options.json) await output.json({ disk: name, ...made, path });
      else await output.line(`${path}: ${humanSize(made.sizeBytes)}, uuid ${made.uuid}`);
    });
  const exported = withExamples(
    command
      .command('export')
      .description('Writes a disk as a raw file (sparse) or as qcow2 (needs qemu-img), as it is now.'),
    [
      { line: 'dsec disk export raw work work.raw', what: 'a raw file' },
      { line: 'dsec disk export qcow2 work work.qcow2', what: 'for QEMU' },
    ],
  );
  withJson(exported)
    .argument('<format>', 'raw or qcow2')
    .argument('<disk>', 'its name')
    .argument('<file>', 'it must not be there')
    .action(async (format: string, name: string, file: string, options: JsonOption) => {
      const chosen = choice('format', format, ['raw', 'qcow2'] as const);
      refuseExisting(file);
      const { sizeBytes } = await onDisk(
        name,
        {
          async here({ disk }) {
            await (chosen === 'raw' ? exportRaw : exportQcow2)(disk, file, signal);
            return { sizeBytes: disk.sizeBytes };
          },
          there: (service) => service.exportTo(name, chosen, file),
        },
        { signal, openStoreLayer: storeLayerOpener() },
      );
      if (options.json) await output.json({ disk: name, format: chosen, file, sizeBytes });
      else await output.line(`${file}: ${humanSize(sizeBytes)}, ${chosen}`);
    });
}

function addRemove(command: Command, { output }: Context): void {
  const rm = withExamples(
    command
      .command('rm')
      .description(
        'Removes disks with all their snapshots. One whose layers another disk lies on stays, and one that is attached.',
      ),
    [{ line: 'dsec disk rm work work-again', what: 'two disks' }],
  );
  withJson(rm)
    .argument('<disks...>', 'their names')
    .action(async (names: string[], options: JsonOption) => {
      for (const name of names) {
        await removeUnattached(name);
        if (!options.json) await output.line(`${name}: removed`);
      }
      if (options.json) await output.json({ removed: names });
    });
}

async function pointOf(name: string, point: string): Promise<NamedSnapshot | undefined> {
  return diskFacts(await readConfig(diskFolder(name))).snapshots.find((one) => one.name === point);
}

function layersBelow(
  disk: string,
  { baseLayers, snapshots }: OpenDisk['facts'],
  { since, whole }: PackOptions,
): number {
  if (whole) return 0;
  if (since === undefined) return baseLayers;
  const found = snapshots.find((snapshot) => snapshot.name === since);
  if (found === undefined) {
    const names = snapshots.map(({ name }) => name).join(', ');
    throw fail('CLI_DISK_SNAPSHOT', {
      disk,
      snapshot: since,
      known: snapshots.length === 0 ? 'it has none' : `it has ${names}`,
    });
  }
  return found.layers;
}

function refuseExisting(path: string): void {
  if (existsSync(path)) throw fail('CLI_OUTPUT_EXISTS', { path });
}
