/** `dsec disk attach`, `detach`: disks as block devices, served by the block service (dsec serve ublkd). */
import { resolve } from 'node:path';
import type { Command } from 'commander';
import { humanSize } from '#base';
import { type DiskView, WAY_NAMES } from '#ublk-daemon';
import { fail } from '../../errors.ts';
import { attachDisk, findService, isSameFolder, refuseOtherDisks } from '../../ublkd-service/client.ts';
import type { AttachRequest } from '../../ublkd-service/schemas.ts';
import { choice } from '../choice.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface AttachOptions extends JsonOption {
  readonly way: string;
  readonly readOnly?: boolean;
  readonly at?: string;
}

export function addAttach(command: Command, { output, signal }: Context): void {
  const attach = withExamples(
    command
      .command('attach')
      .description(
        'Shows a disk, or a raw file, to other programs until it is detached: as a block device where the kernel has ublk, else over NBD; `--way loop` makes ' +
          'a block device without ublk, `--way file` a file. Prints the device, the URI or the path. The block service does it (`dsec serve ublkd`, docs/ublkd.md); where none runs, one is started in the background, ' +
          'which ends five minutes after the last disk was detached. Asked again for the same, it prints the same. While a disk is attached, ' +
          'snapshot, compact, pack-diff and export work as always.',
      ),
    [
      { line: 'dsec disk attach work', what: 'a disk by its name' },
      { line: 'sudo mount $(sudo dsec disk attach work --way ublk) /mnt', what: 'mounted' },
      { line: 'dsec disk attach ./disk.raw --read-only --way nbd', what: 'a file: its path has a slash' },
      { line: 'dsec disk attach work --at tcp:127.0.0.1:10809', what: 'where one wants it' },
    ],
  );
  withJson(attach)
    .argument('<disk>', 'the name of a disk, or the path of a raw file, with a slash')
    .option('--way <way>', `auto, ${WAY_NAMES.join(', ')}`, 'auto')
    .option('--read-only', 'refuse writes')
    .option(
      '--at <address>',
      'unix:PATH or tcp:127.0.0.1:PORT for NBD, /dev/ublkbN for ublk, the path of a file for file and loop',
    )
    .action(async (disk: string, options: AttachOptions) => {
      const way = choice('--way', options.way, ['auto', ...WAY_NAMES] as const);
      const { readOnly } = options;
      const wish: AttachRequest = { ...sourceOf(disk), way, readOnly, address: addressOf(options.at) };
      const attached = await attachDisk(wish, signal);
      if (options.json) await output.json(attached);
      else await output.line(attached.at);
    });
  const detach = withExamples(
    command
      .command('detach')
      .description(
        'Takes a disk away from other programs, after everything they were answered is safely on the disk. It is refused while somebody uses it (a mount, ' +
          'a process that has it open, an NBD client), unless --force: then they get errors.',
      ),
    [
      { line: 'dsec disk detach work', what: 'one' },
      { line: 'dsec disk detach --force work ./disk.raw', what: 'two, whoever uses them' },
    ],
  );
  withJson(detach)
    .argument('<disks...>', 'names of disks, or paths of raw files')
    .option('--force', 'also while it is in use')
    .action(async (disks: string[], options: JsonOption & { readonly force?: boolean }) => {
      const service = await findService(signal);
      if (service !== undefined && disks.some((disk) => 'disk' in sourceOf(disk))) await refuseOtherDisks(service);
      const done = [];
      for (const disk of disks) {
        const name = nameOf(disk);
        if (service === undefined) throw fail('UBLKD_NONE', { name });
        const detached = await service.detach(name, options.force === true);
        done.push(detached);
        if (!options.json) await output.line(`${disk}: ${detached.state}`);
      }
      if (options.json) await output.json(done);
    });
}

/** Of `dsec disk ls`: how each is attached, by name; raw files are named by their paths. */
export async function attachedDisks(disksFolder: string, signal?: AbortSignal): Promise<DiskView[]> {
  const listed = await (await findService(signal))?.list();
  return listed !== undefined && isSameFolder(listed.disksFolder, disksFolder) ? listed.disks : [];
}

export function attachedText({ state, at, sizeBytes, kind }: DiskView): string {
  const text = state === 'attached' ? at : `${state}: ${at}`;
  return kind === 'file' && sizeBytes !== undefined ? `${text} (${humanSize(sizeBytes)})` : text;
}

const NAMED = /^disk:(.+)$/;

function sourceOf(disk: string): { disk: string } | { file: string } {
  const name = NAMED.exec(disk)?.[1] ?? disk;
  return name.includes('/') && name === disk ? { file: resolve(disk) } : { disk: name };
}

function nameOf(disk: string): string {
  const source = sourceOf(disk);
  return 'disk' in source ? source.disk : source.file;
}

/** Paths are those of this process. */
function addressOf(at: string | undefined): string | undefined {
  if (at === undefined || at.startsWith('tcp:')) return at;
  return at.startsWith('unix:') ? `unix:${resolve(at.slice('unix:'.length))}` : resolve(at);
}
