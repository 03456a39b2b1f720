/** `dsec disk serve`: a disk or a raw file as a block device, over NBD, until it is told to end. */
import { basename } from 'node:path';
import type { Command } from 'commander';
import { isDsecError, systemCode } from '#base';
import { type BlockTarget, openFileTarget, openNamedDisk, serveNbd } from '#ublk-daemon';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { inputError } from '../input-error.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface Options extends JsonOption {
  readonly nbd: string;
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
        'Serves a disk of `dsec disk create`, or a raw one, a plain or sparse file, over NBD until SIGINT or SIGTERM: for qemu, nbdcopy, nbd-client and ' +
          'their like. One process may write to a disk or file, any number may read a file. TCP is for this machine alone (loopback): NBD has no passwords.',
      ),
    [
      { line: 'dsec disk serve disk:work --nbd unix:/run/work.sock', what: 'a disk by its name' },
      { line: 'dsec disk serve disk.raw --nbd unix:/run/disk.sock', what: 'on a socket that is this user’s alone' },
      {
        line: "dsec disk serve disk.raw --read-only --nbd tcp:127.0.0.1:0 --json | jq -r '.uri'",
        what: 'on a free port',
      },
      { line: "qemu-img info 'nbd+unix:///disk.raw?socket=/run/disk.sock'", what: 'what a client does with it' },
    ],
  );
  withJson(serve)
    .argument('<disk>', 'disk:NAME of `dsec disk create`, or a raw file: a regular one of whole 512-byte blocks')
    .requiredOption('--nbd <address>', 'unix:PATH or tcp:127.0.0.1:PORT; port 0 takes a free one')
    .option('--name <name>', 'of the export; clients that name none get it too (default: that of the disk or file)')
    .option('--read-only', 'refuse writes')
    .action(async (file: string, options: Options) => {
      const readOnly = options.readOnly === true;
      const target = await openFile(file, readOnly);
      // However the command ends: what is at work is finished, and written.
      defer(() => target.close());
      const name = options.name ?? NAMED.exec(file)?.[1] ?? basename(file);
      const server = await serveNbd({ listen: options.nbd, exports: [{ name, target, readOnly }] });
      defer(() => server.close());
      await new Promise<void>((done) => {
        takeSignals((signal) => {
          if (signal !== 'SIGHUP') done();
        });
        const { sizeBytes } = target;
        const at = { file, name, sizeBytes, readOnly, address: server.addressText, uri: server.uri(name) };
        if (options.json) output.json(at);
        else output.line(`${file} (${sizeBytes} bytes${readOnly ? ', read-only' : ''}) at ${at.uri}`);
      });
    });
}

async function openFile(file: string, readOnly: boolean): Promise<BlockTarget> {
  const name = NAMED.exec(file)?.[1];
  if (name !== undefined) return (await openNamedDisk(name)).disk;
  try {
    return await openFileTarget(file, { readOnly });
  } catch (error) {
    throw !isDsecError(error) && systemCode(error) !== undefined ? inputError(file, error) : error;
  }
}
