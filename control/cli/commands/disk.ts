/** `dsec disk`: OverlayBD layers and the disks made of them. */
import { humanSize, isDsecError, systemCode } from '#base';
import {
  dumpLayer,
  type LayerDump,
  type LayerVerdict,
  type LsmtHeader,
  verifyLayer,
  type ZfileDump,
} from '#ublk-daemon';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { counted } from '../counted.ts';
import { withExamples } from '../examples.ts';
import { inputError } from '../input-error.ts';
import { type JsonOption, withJson } from '../store-option.ts';
import { addAttach } from './disk-attach.ts';
import { addManagement } from './disk-manage.ts';
import { addReshape } from './disk-reshape.ts';
import { addServe } from './disk-serve.ts';

interface DumpOptions extends JsonOption {
  readonly segments: string;
}

interface Checked extends Partial<LayerVerdict> {
  readonly file: string;
  readonly ok: boolean;
  readonly code?: string;
  readonly problem?: string;
}

export const definition: CommandDefinition = {
  description:
    'Makes block disks with snapshots, whose layers are in the format of OverlayBD, and shows and checks such layers: LSMT files, sealed or ' +
    'writable, alone, in a ZFile, or in the tar that registries carry (docs/overlaybd.md). Shows disks and raw files to other programs: as block devices (docs/ublkd.md), and over NBD (docs/nbd.md).',
  examples: [
    { line: 'dsec disk create work --size 64G --ext4', what: 'a disk with an empty file system' },
    { line: 'dsec disk attach work', what: 'as a block device, or over NBD' },
    { line: 'dsec disk snapshot work before-upgrade', what: 'a point to come back to' },
    { line: 'dsec disk dump layer.tar', what: 'headers and segments of a layer' },
    { line: 'dsec disk verify *.lsmt', what: 'every checksum and every entry of several' },
    { line: 'dsec disk serve disk.raw --nbd unix:/run/disk.sock', what: 'a raw disk for qemu and its like' },
  ],
  json:
    'dump: an object: `file`, `sizeBytes`, `tar`, `zfile` (`header`, `trailer`, `originalSize`, `blocks`, `storedBytes`), `lsmt` (`kind`, `header`, `trailer`, ' +
    '`entries`, `paddingEntries`, `dataBytes`, `zeroedBytes`, `segments`: `offset`, `length`, `moffset` in 512-byte sectors, `zeroed`, `tag`); ' +
    'verify: an array: `file`, `ok`, `tar`, `zfile`, `kind`, `blocks`, `segments`, `checksummed`, and `code`, `problem` of what is damaged; ' +
    'create, and in an array ls: `name`, `sizeBytes`, `layers`, `diskBytes`, `snapshots` (`name`, `layers`, `uuid`, `createdAt`), and in ls `problem` of one that cannot be read, and `attached` (as attach), and of attached raw files `name` and `attached` alone; snapshot: `disk`, `snapshot`, `uuid`, `layer`, and with --name `image` (`name`, `digest`, `layers`, `newLayers`, `newBytes`); ' +
    'restore: `disk`, `from`, `snapshot`; compact: `disk`, `reclaimedBytes`, `indexEntriesBefore`, `indexEntriesAfter`; pack-diff: `disk`, `uuid`, `path`, `sizeBytes`, `segments`, with --name `disk`, `image` (as snapshot); ' +
    'resize: `disk`, `sizeBytes`, `told` (who has it open has been told); merge: `disk`, `layersBefore`, `layersAfter`, of files `path`, `uuid`, `sizeBytes`, `segments`, `layers`; ' +
    'export: `disk`, `format`, `file`, `sizeBytes`; rm: `removed`; ' +
    'attach: `name`, `kind` (disk, file), `state` (attached, failed, detaching), `way`, `at`, `readOnly`, `attachedAt`, `sizeBytes`, `problem`, `working`; ' +
    'detach: an array: `name`, `state` (detached, or detaching: it goes on); ' +
    'serve: an object once it listens: `file`, `name`, `sizeBytes`, `readOnly`, `address`, `uri`',
  configure(command, context) {
    const { output, signal } = context;
    const dump = withExamples(
      command.command('dump').description('Shows headers and segments of a layer as they are on disk.'),
      [
        { line: 'dsec disk dump layer.lsmt', what: 'everything' },
        { line: 'dsec disk dump --segments 0 layer.tar', what: 'headers alone' },
        { line: "dsec disk dump --json layer.lsmt | jq '.lsmt.segments | length'", what: 'how many segments' },
      ],
    );
    withJson(dump)
      .argument('<file>', 'a layer, or a file of a writable one')
      .option('--segments <number>', 'show at most so many segments', 'all')
      .action(async (file: string, options: DumpOptions) => {
        const found = await orInputError(file, () => dumpLayer(file, { maxSegments: segmentLimit(options.segments) }));
        if (options.json) await output.json(found);
        else for (const line of dumpLines(found)) await output.line(line);
      });
    const verify = withExamples(
      command
        .command('verify')
        .description(
          'Checks layers: headers, indexes, and each block of a ZFile against its checksum. LSMT alone has no checksums: of such a file only ' +
            'the structure can be checked. Ends with 3 when one is damaged.',
        ),
      [
        { line: 'dsec disk verify layer.tar', what: 'one layer' },
        { line: 'dsec disk verify --json *.tar', what: 'several, as JSON' },
      ],
    );
    withJson(verify)
      .argument('<files...>', 'layers')
      .action(async (files: string[], options: JsonOption) => {
        const results: Checked[] = [];
        for (const file of files) {
          signal.throwIfAborted();
          const result = await check(file);
          results.push(result);
          if (!options.json) await output.line(verdictText(result));
        }
        if (options.json) await output.json(results);
        if (results.some(({ ok }) => !ok)) context.exitCode = 3;
      });
    addManagement(command, context);
    addReshape(command, context);
    addAttach(command, context);
    addServe(command, context);
  },
};

async function check(file: string): Promise<Checked> {
  try {
    return { ok: true, ...(await orInputError(file, () => verifyLayer(file))) };
  } catch (error) {
    // What is damaged must not hide the rest; what cannot be read at all ends the command.
    if (!isDsecError(error) || (error.exit !== 3 && error.code !== 'ZFILE_UNSUPPORTED')) throw error;
    return { file, ok: false, code: error.code, problem: error.message };
  }
}

async function orInputError<T>(file: string, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    throw !isDsecError(error) && systemCode(error) !== undefined ? inputError(file, error) : error;
  }
}

function segmentLimit(text: string): number {
  if (text === 'all') return Number.POSITIVE_INFINITY;
  const value = Number(text);
  if (/^\d+$/.test(text) && Number.isSafeInteger(value)) return value;
  throw fail('CLI_USAGE', { problem: `--segments ${text}: not a whole number`, program: 'dsec disk dump' });
}

function verdictText({ file, ok, problem, kind, zfile, blocks, segments, checksummed }: Checked): string {
  if (!ok) return `DAMAGED ${problem?.startsWith(file) ? problem : `${file}: ${problem}`}`;
  const parts = [
    kind ?? 'no LSMT inside',
    counted(segments!, 'segment'),
    ...(zfile ? [counted(blocks!, 'block')] : []),
    checksummed ? 'every checksum right' : 'no checksums in it',
  ];
  return `ok      ${file}: ${parts.join(', ')}`;
}

function dumpLines({ file, sizeBytes, tar, zfile, lsmt }: LayerDump): string[] {
  const lines = [
    `${file}: ${humanSize(sizeBytes)}${tar ? ', tar' : ''}${zfile ? ', ZFile' : ''}${lsmt ? ', LSMT' : ''}`,
  ];
  if (zfile !== undefined) lines.push(...zfileLines(zfile));
  if (lsmt === undefined) return lines;
  const { kind, header, trailer, entries, paddingEntries, dataBytes, zeroedBytes, segments } = lsmt;
  lines.push(`lsmt header    ${headerText(header)}`);
  if (trailer !== undefined) lines.push(`lsmt trailer   ${headerText(trailer)}`);
  lines.push(
    `${kind}: device ${humanSize((trailer ?? header).virtualSize)}, ${entries} entries (${paddingEntries} padding), ` +
      `data ${humanSize(dataBytes)}, zeroed ${humanSize(zeroedBytes)}`,
  );
  if (segments.length > 0) lines.push('      offset  length     moffset  tag   (sectors of 512 bytes)');
  for (const { offset, length, moffset, zeroed, tag } of segments) {
    lines.push(
      `${String(offset).padStart(12)} ${String(length).padStart(7)} ${String(moffset).padStart(11)} ${String(tag).padStart(4)}${zeroed ? '   zeroed' : ''}`,
    );
  }
  const shown = entries - paddingEntries - segments.length;
  if (shown > 0) lines.push(`and ${counted(shown, 'more segment')}`);
  return lines;
}

function zfileLines({ header, trailer, originalSize, blocks, storedBytes }: ZfileDump): string[] {
  const algorithm = ['minilzo', 'lz4', 'zstd'][trailer.algorithm] ?? `algorithm ${trailer.algorithm}`;
  return [
    `zfile header   flags 0x${header.flags.toString(16)}, index at ${header.indexOffset}, ${header.indexEntries} blocks`,
    `zfile trailer  flags 0x${trailer.flags.toString(16)}, index at ${trailer.indexOffset}, ${trailer.indexEntries} blocks`,
    `zfile          ${algorithm}, blocks of ${trailer.blockSize}, ${originalSize} bytes in ${blocks} blocks of ${storedBytes}, ` +
      `${trailer.verify ? 'a checksum each' : 'no checksums'}`,
  ];
}

function headerText(header: LsmtHeader): string {
  const { flags, indexOffset, indexEntries, virtualSize, uuid, parentUuid, userTag } = header;
  return (
    `flags ${flags}, index at ${indexOffset}, ${indexEntries} entries, device of ${virtualSize} bytes, uuid ${uuid}, parent ${parentUuid}` +
    (userTag === '' ? '' : `, tag ${JSON.stringify(userTag)}`)
  );
}
