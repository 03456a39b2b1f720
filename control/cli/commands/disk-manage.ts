/** `dsec disk create`, `ls`, `snapshot`, `restore`, `compact`, `pack-diff`, `export`, `rm`: the named disks of this machine. */
import { randomUUID } from 'node:crypto';
import { existsSync } from 'node:fs';
import type { Command } from 'commander';
import { humanSize } from '#base';
import {
  createNamedDisk,
  type DiskOrigin,
  exportQcow2,
  exportRaw,
  listDisks,
  type OpenDisk,
  openNamedDisk,
  removeDisk,
  restoreDisk,
  type ZfileOptions,
} from '#ublk-daemon';
import { fail } from '../../errors.ts';
import { choice } from '../choice.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { parseSize } from '../size.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface CreateOptions extends JsonOption {
  readonly size?: string;
  readonly from?: string;
  readonly ext4?: boolean;
  readonly mode: string;
}

interface PackOptions extends JsonOption {
  readonly output: string;
  readonly since?: string;
  readonly whole?: boolean;
  readonly compress?: string;
  readonly blockSize: string;
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
        'Makes a disk: empty, with a new ext4 file system, of a raw or qcow2 file, or on top of the layers of a config.v1.json. ' +
          'It takes room only for what is written to it.',
      ),
    [
      { line: 'dsec disk create work --size 64G', what: 'an empty one' },
      { line: 'dsec disk create data --size 10G --ext4', what: 'with an empty ext4' },
      { line: 'dsec disk create web --size 10G --from dir:./site', what: 'with an ext4 that holds a folder' },
      { line: 'dsec disk create vm --from qcow2:debian.qcow2 --size 64G', what: 'of an image, larger than it' },
      { line: 'dsec disk create vm2 --from config:layers/config.v1.json', what: 'on top of OverlayBD layers' },
    ],
  );
  withJson(create)
    .argument('<name>', 'letters, digits, dot, dash and underscore')
    .option('--size <size>', 'of the device: 64G, 512MiB (default: that of --from)')
    .option('--from <source>', 'raw:FILE, qcow2:FILE, dir:FOLDER (needs --size) or config:FILE')
    .option('--ext4', 'make an ext4 file system (needs --size)')
    .option('--mode <mode>', 'of the writable layer: log, or sparse (in place, no compaction)', 'log')
    .action(async (name: string, options: CreateOptions) => {
      const mode = choice('--mode', options.mode, ['log', 'sparse'] as const);
      const origin = originOf(options);
      const sizeBytes = options.size === undefined ? undefined : parseSize('--size', options.size);
      if (sizeBytes === undefined && (origin === undefined || origin.kind === 'ext4')) {
        throw fail('CLI_USAGE', { problem: 'an empty disk needs --size', program: 'dsec disk create' });
      }
      await createNamedDisk(name, { sizeBytes, origin, mode });
      const made = (await listDisks()).find((disk) => disk.name === name);
      if (options.json) await output.json(made);
      else await output.line(`${name}: ${humanSize(made?.sizeBytes ?? 0)}, takes ${humanSize(made?.diskBytes ?? 0)}`);
    });
}

function originOf({ from, ext4 = false }: CreateOptions): DiskOrigin | undefined {
  if (from === undefined) return ext4 ? { kind: 'ext4' } : undefined;
  if (ext4)
    throw fail('CLI_USAGE', { problem: '--ext4 makes a new one: not with --from', program: 'dsec disk create' });
  const [, kind, path] = /^(raw|qcow2|dir|config):(.+)$/.exec(from) ?? [];
  if (kind === undefined || path === undefined) {
    throw fail('CLI_USAGE', {
      problem: `--from ${from}: it is raw:FILE, qcow2:FILE, dir:FOLDER or config:FILE`,
      program: 'dsec disk create',
    });
  }
  if (!existsSync(path)) throw fail('CLI_INPUT_MISSING', { path });
  return kind === 'dir' ? { kind: 'ext4', folder: path } : { kind: kind as 'raw' | 'qcow2' | 'config', path };
}

function addList(command: Command, { output }: Context): void {
  const list = withExamples(command.command('ls').description('Lists the disks of this machine and their snapshots.'), [
    { line: 'dsec disk ls', what: 'what there is' },
    { line: "dsec disk ls --json | jq -r '.[].snapshots[].name'", what: 'the names of all snapshots' },
  ]);
  withJson(list).action(async (options: JsonOption) => {
    const disks = await listDisks();
    if (options.json) return output.json(disks);
    if (disks.length === 0) return output.note('there are no disks');
    await output.table(
      [
        { title: 'NAME' },
        { title: 'SIZE', right: true },
        { title: 'TAKES', right: true },
        { title: 'LAYERS', right: true },
        { title: 'SNAPSHOTS' },
      ],
      disks.map(({ name, sizeBytes, diskBytes, layers, snapshots }) => [
        name,
        humanSize(sizeBytes),
        humanSize(diskBytes),
        String(layers),
        snapshots.map((snapshot) => snapshot.name).join(' '),
      ]),
    );
  });
}

function addSnapshots(command: Command, { output }: Context): void {
  const snapshot = withExamples(
    command
      .command('snapshot')
      .description(
        'Keeps a disk as it is now under a name. It takes time by what was changed, not by what the disk holds. The disk must not be in use.',
      ),
    [{ line: 'dsec disk snapshot work before-upgrade', what: 'a point to come back to' }],
  );
  withJson(snapshot)
    .argument('<disk>', 'its name')
    .argument('<snapshot>', 'a name for the point')
    .action(async (name: string, point: string, options: JsonOption) => {
      const { path, uuid } = await withDisk(name, ({ snapshot: seal }) => seal(point));
      if (options.json) await output.json({ disk: name, snapshot: point, uuid, layer: path });
      else await output.line(`${name}: snapshot ${point}`);
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
      await restoreDisk(name, point, fresh);
      if (options.json) await output.json({ disk: fresh, from: name, snapshot: point });
      else await output.line(`${fresh}: ${name} as of ${point}`);
    });
  const compact = withExamples(
    command
      .command('compact')
      .description(
        'Gives back the room that overwritten and discarded data of the writable layer takes. The disk must not be in use.',
      ),
    [{ line: 'dsec disk compact work', what: 'one disk' }],
  );
  withJson(compact)
    .argument('<disk>', 'its name')
    .action(async (name: string, options: JsonOption) => {
      const done = await withDisk(name, ({ disk }) => disk.compact());
      if (options.json) await output.json({ disk: name, ...done });
      else await output.line(`${name}: ${humanSize(done.reclaimedBytes)} given back`);
    });
}

function addWaysOut(command: Command, { output }: Context): void {
  const pack = withExamples(
    command
      .command('pack-diff')
      .description(
        'Writes what was changed as one OverlayBD layer: since the disk was made, since a snapshot, or the whole disk. The layer names the one that it ' +
          'lies on as its parent. The disk must not be in use.',
      ),
    [
      { line: 'dsec disk pack-diff work -o changes.lsmt', what: 'all changes to what it was made of' },
      {
        line: 'dsec disk pack-diff work --since before-upgrade -o upgrade.tar --compress zstd --tar',
        what: 'for a registry',
      },
      { line: 'dsec disk pack-diff work --whole -o all.lsmt', what: 'everything, in one layer' },
    ],
  );
  withJson(pack)
    .argument('<disk>', 'its name')
    .requiredOption('-o, --output <file>', 'the layer; it must not be there')
    .option('--since <snapshot>', 'changes since that point')
    .option('--whole', 'the whole disk, without a parent')
    .option('--compress <algorithm>', 'in a ZFile: lz4 or zstd')
    .option('--block-size <KiB>', 'of the ZFile: 4, 8, 16, 32 or 64', '4')
    .option('--tar', 'in the tar that registries carry')
    .action(async (name: string, options: PackOptions) => {
      if (options.since !== undefined && options.whole) {
        throw fail('CLI_USAGE', { problem: 'give --since or --whole, not both', program: 'dsec disk pack-diff' });
      }
      const algorithm = choice('--compress', options.compress, ['lz4', 'zstd'] as const);
      const blockSize = Number(choice('--block-size', options.blockSize, ['4', '8', '16', '32', '64'])) * 1024;
      const zfile: ZfileOptions | undefined = algorithm === undefined ? undefined : { algorithm, blockSize };
      refuseExisting(options.output);
      const uuid = randomUUID().toUpperCase();
      const made = await withDisk(name, ({ disk, facts }) =>
        disk.commitAbove(layersBelow(name, facts, options), options.output, { uuid, zfile, tar: options.tar === true }),
      );
      if (options.json) await output.json({ disk: name, uuid, ...made });
      else await output.line(`${options.output}: ${humanSize(made.sizeBytes)}, uuid ${uuid}`);
    });
  const exported = withExamples(
    command
      .command('export')
      .description('Writes a disk as a raw file (sparse) or as qcow2 (needs qemu-img). The disk must not be in use.'),
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
      const sizeBytes = await withDisk(name, async ({ disk }) => {
        await (chosen === 'raw' ? exportRaw(disk, file) : exportQcow2(disk, file));
        return disk.sizeBytes;
      });
      if (options.json) await output.json({ disk: name, format: chosen, file, sizeBytes });
      else await output.line(`${file}: ${humanSize(sizeBytes)}, ${chosen}`);
    });
}

function addRemove(command: Command, { output }: Context): void {
  const rm = withExamples(
    command
      .command('rm')
      .description('Removes disks with all their snapshots. One whose layers another disk lies on stays.'),
    [{ line: 'dsec disk rm work work-again', what: 'two disks' }],
  );
  withJson(rm)
    .argument('<disks...>', 'their names')
    .action(async (names: string[], options: JsonOption) => {
      for (const name of names) {
        await removeDisk(name);
        if (!options.json) await output.line(`${name}: removed`);
      }
      if (options.json) await output.json({ removed: names });
    });
}

async function withDisk<T>(name: string, work: (opened: OpenDisk) => Promise<T>): Promise<T> {
  const opened = await openNamedDisk(name);
  try {
    return await work(opened);
  } finally {
    await opened.disk.close();
  }
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
