/** `dsec disk serve`: a disk or a raw file as a block device, over NBD or as a file, until it is told to end. */
import { existsSync } from 'node:fs';
import { basename, join } from 'node:path';
import type { Command } from 'commander';
import { isDsecError, systemCode } from '#base';
import { becomeIoFlusher } from '#linux';
import { type BlockTarget, disksFolder, openFileTarget, openNamedDisk, serveFile, serveNbd } from '#ublk-daemon';
import { storeLayerOpener } from '../../disk-layers.ts';
import { fail } from '../../errors.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { inputError } from '../input-error.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface Options extends JsonOption {
  readonly nbd?: string;
  readonly file?: string;
  readonly loop?: boolean;
  readonly name?: string;
  readonly readOnly?: boolean;
}

/** A disk of this machine by its name; anything else is a file. */
const NAMED = /^disk:(.+)$/;

export function addServe(command: Command, { output, defer, takeSignals }: Context): void {
  const serve = withExamples(
    command
      .command('serve')
      .description(
        'Serves a disk of `dsec disk create`, or a raw one, a plain or sparse file, until SIGINT or SIGTERM: over NBD, for qemu, nbdcopy, nbd-client and ' +
          'their like, or as one file of the size of the disk, where --loop makes a block device of it (root; docs/disk-file.md). One process may write ' +
          'to a disk or file, any number may read a file. TCP is for this machine alone (loopback): NBD has no passwords.',
      ),
    [
      { line: 'dsec disk serve disk:work --nbd unix:/run/work.sock', what: 'a disk by its name' },
      { line: 'dsec disk serve disk.raw --nbd unix:/run/disk.sock', what: 'on a socket that is this user’s alone' },
      {
        line: "dsec disk serve disk.raw --read-only --nbd tcp:127.0.0.1:0 --json | jq -r '.uri'",
        what: 'on a free port',
      },
      { line: 'sudo dsec disk serve disk:work --file /run/work.img --loop', what: 'as a file, and as /dev/loopN' },
      { line: "qemu-img info 'nbd+unix:///disk.raw?socket=/run/disk.sock'", what: 'what a client does with it' },
    ],
  );
  withJson(serve)
    .argument('<disk>', 'disk:NAME of `dsec disk create`, or a raw file: a regular one of whole 512-byte blocks')
    .option('--nbd <address>', 'unix:PATH or tcp:127.0.0.1:PORT; port 0 takes a free one')
    .option('--file <path>', 'show it as this file: one that is not there, or is empty')
    .option('--loop', 'with --file: a loop device over the file, too')
    .option('--name <name>', 'of the export; clients that name none get it too (default: that of the disk or file)')
    .option('--read-only', 'refuse writes')
    .action(async (file: string, options: Options) => {
      refuseMix(options);
      // Before the first thread that the disk is read and written by.
      becomeIoFlusher();
      const readOnly = options.readOnly === true;
      const target = await openFile(file, readOnly);
      // However the command ends: what is at work is finished, and written.
      defer(() => target.close());
      const shown = { file, sizeBytes: target.sizeBytes, readOnly: readOnly || target.readOnly };
      const { at, failed, more } = await serveOne(file, target, readOnly, options, defer);
      const told = new Promise<void>((done) => {
        takeSignals((signal) => {
          if (signal !== 'SIGHUP') done();
        });
      });
      if (options.json) output.json({ ...shown, ...more });
      else output.line(`${file} (${shown.sizeBytes} bytes${shown.readOnly ? ', read-only' : ''}) at ${at}`);
      await Promise.race([told, ...(failed === undefined ? [] : [failed])]);
    });
}

interface Served {
  readonly at: string;
  readonly more: Readonly<Record<string, unknown>>;
  readonly failed?: Promise<never>;
}

async function serveOne(
  file: string,
  target: BlockTarget,
  readOnly: boolean,
  options: Options,
  defer: Context['defer'],
): Promise<Served> {
  if (options.nbd !== undefined) {
    const name = options.name ?? NAMED.exec(file)?.[1] ?? basename(file);
    const server = await serveNbd({ listen: options.nbd, exports: [{ name, target, readOnly }] });
    defer(() => server.close());
    return { at: server.uri(name), more: { name, address: server.addressText, uri: server.uri(name) } };
  }
  const server = await serveFile({ target, path: options.file!, loop: options.loop, readOnly });
  defer(() => server.stop());
  const { path, loop, failed } = server;
  return { at: loop === undefined ? path : `${loop} (${path})`, more: { path, loop }, failed };
}

function refuseMix({ nbd, file, loop, name }: Options): void {
  const refuse = (problem: string) => fail('CLI_USAGE', { problem, program: 'dsec disk serve' });
  if ((nbd === undefined) === (file === undefined)) throw refuse('name one of --nbd and --file');
  if (loop && file === undefined) throw refuse('--loop goes with --file');
  if (name !== undefined && nbd === undefined) throw refuse('--name goes with --nbd');
}

async function openFile(file: string, readOnly: boolean): Promise<BlockTarget> {
  const name = NAMED.exec(file)?.[1];
  if (name !== undefined) return (await openNamedDisk(name, { openStoreLayer: storeLayerOpener() })).disk;
  try {
    return await openFileTarget(file, { readOnly });
  } catch (error) {
    if (systemCode(error) === 'ENOENT' && isDiskName(file) && existsSync(join(disksFolder(), file))) {
      throw fail('CLI_DISK_PREFIX', { disk: file }, error);
    }
    throw !isDsecError(error) && systemCode(error) !== undefined ? inputError(file, error) : error;
  }
}

function isDiskName(file: string): boolean {
  return !file.includes('/') && file !== '.' && file !== '..';
}
