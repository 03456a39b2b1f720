/** `dsec convert`: from an image, a tar or a folder to EROFS in the store. */
import { createReadStream } from 'node:fs';
import { setFlagsFromString } from 'node:v8';
import { type ByteString, humanSize, isDsecError, nodePath, systemCode } from '#base';
import { CODEC_NAMES, type CodecName, MAX_INLINE_LIMIT_BYTES, parsePlatform } from '#converter';
import {
  type BlobStore,
  checkTraceSize,
  convertBatch,
  convertToStore,
  type ImageKind,
  openImage,
  parseTrace,
  traceOf,
} from '#imagesvc';
import { fail } from '../../errors.ts';
import { readBatchFile } from '../batch-file.ts';
import { choice } from '../choice.ts';
import type { CommandDefinition } from '../command.ts';
import type { Context } from '../context.ts';
import { type ConversionReport, reportOn } from '../conversion-report.ts';
import { convertAllThere, convertThere, type Outcome } from '../convert-there.ts';
import { counted } from '../counted.ts';
import { inputError } from '../input-error.ts';
import { nameFromSource } from '../name-from-source.ts';
import { reportOf } from '../report-error.ts';
import { type ServerOption, serverOf, withServer } from '../server-option.ts';
import { parseSize } from '../size.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';
import { type TransferOption, withTransfer } from '../transfer-option.ts';

const KINDS = ['base', 'workspace', 'toolkit'] as const satisfies readonly ImageKind[];

interface Options extends StoreOption, TransferOption, JsonOption, ServerOption {
  readonly name?: string;
  readonly kind?: string;
  readonly collapseLimit?: string;
  readonly collapse?: string;
  readonly inlineLimit?: string;
  readonly compress?: string;
  readonly platform?: string;
  readonly prefix?: string;
  readonly profile?: string;
  readonly batch?: string;
  readonly sync: boolean;
}

export const definition: CommandDefinition = {
  description:
    'Converts an OCI image (docker://REFERENCE, oci:FOLDER[:TAG], oci-archive:FILE[:TAG]), a Docker archive (docker-archive:FILE[:REFERENCE]), a tar ' +
    '(tar:FILE) or a folder (dir:FOLDER) to EROFS and publishes it under a name. Layers are read in parallel and collapsed up to a size limit. The same ' +
    'input gives the same digest everywhere. What is in the store already is not converted again; when it fails or is interrupted, nothing is published. ' +
    'With --batch, options hold for all lines, empty lines and lines that start with # are skipped, and when one image fails the others go on: it exits ' +
    'with the status of the first failure.',
  examples: [
    { line: 'dsec convert docker://docker.io/library/alpine:3.20', what: 'from a registry, as alpine:3.20' },
    {
      line: 'dsec convert oci:layouts/web:latest --name web:1 --collapse-limit 0',
      what: 'each layer an EROFS layer of its own',
    },
    {
      line: 'dsec convert dir:./repo --prefix /workspace --name repo:1 --kind workspace',
      what: 'a folder, to be laid over a base at /workspace',
    },
    {
      line: 'dsec convert docker://registry/team/web:1 --server https://images:7070',
      what: 'on the machine of an image service, which has its own store',
    },
    {
      line: 'dsec convert oci:layouts/web:latest --name web:1-laid --profile web:1',
      what: 'laid out by what `dsec trace web:1` recorded',
    },
    { line: 'dsec convert --batch images.txt', what: 'many, `SOURCE NAME` a line: what they share is converted once' },
  ],
  json: 'an object: `source`, `name`, `digest`, `kind`, `layers` (how many), `metaBytes`, `dataBytes`, `sizeBytes`, `reused`, `stats`, `notes`; with --batch one an image, `source`, `name` and `error` for one that failed',
  exactPaths: { options: ['profile'] },
  configure(command, context) {
    const { output, progress, signal } = context;
    withServer(withJson(withTransfer(withStore(command))))
      .argument('[source]', 'where the image is')
      .option('--name <name:tag>', 'what it is called in the store (default: repository and tag of the source)')
      .option('--kind <kind>', `what it is meant for: ${KINDS.join(', ')}`, 'base')
      .option('--collapse-limit <size>', 'merge consecutive layers up to this size; 0 merges none (default: 3GiB)')
      .option(
        '--collapse <how>',
        'data: one blob for each EROFS layer; metadata: one EROFS layer over one blob for each layer',
        'data',
      )
      .option(
        '--inline-limit <size>',
        'ends of files up to this size go into the metadata; 0 for DAX, at most 4000 (default: 3KiB)',
      )
      .option('--compress <codec>', `compress file data: ${CODEC_NAMES.join(', ')}`)
      .option(
        '--profile <trace>',
        'put the files that a trace names first and together, in its order: a file (dsec trace show --json), or an image whose trace is kept',
      )
      .option('--platform <os/arch>', 'of a multi-platform image (default: that of this machine)')
      .option('--prefix <path>', 'of dir: and tar:, the folder of the image that the tree is placed at (default: /)')
      .option('--no-sync', 'do not wait for the disk: a power cut just after may cost the result (folder stores)')
      .option('--batch <file>', 'convert every `SOURCE NAME` line of this file; - is stdin; a source with blanks in ""')
      .action(async (source: string | undefined, options: Options) => {
        optimizeLate();
        const { creds: credentials, insecure } = options;
        const settings = {
          kind: choice('--kind', options.kind, KINDS),
          collapse: choice('--collapse', options.collapse, ['data', 'metadata'] as const),
          collapseLimitBytes: sizeOf('--collapse-limit', options.collapseLimit),
          inlineLimitBytes: inlineLimitOf(options.inlineLimit),
          compress: choice<CodecName>('--compress', options.compress, CODEC_NAMES),
          platform: options.platform === undefined ? undefined : parsePlatform(options.platform),
          prefix: options.prefix,
          credentials,
          insecure,
          progress,
          signal,
        };
        const remote = serverOf(options);
        if (remote !== undefined && options.profile !== undefined) {
          throw fail('CLI_USAGE', { problem: '--profile cannot be used with --server', program: 'dsec convert' });
        }
        if (options.batch !== undefined) {
          if (source !== undefined || options.name !== undefined) {
            throw fail('CLI_USAGE', {
              problem: '--batch takes sources and names from its file',
              program: 'dsec convert',
            });
          }
          const items = await readBatchFile(options.batch, signal);
          if (remote !== undefined) return showBatch(await convertAllThere(remote, items, settings), options, context);
          const store = await openChosenStore(options, { sync: options.sync });
          const profile = await profileOf(store, options.profile);
          const outcomes = await convertBatch(store, items, { ...settings, profile, here: true });
          return showBatch(
            outcomes.map((outcome) => ('error' in outcome ? outcome : reportOn(outcome))),
            options,
            context,
          );
        }
        if (source === undefined)
          throw fail('CLI_USAGE', { problem: 'name a source, or give --batch', program: 'dsec convert' });
        const name = options.name ?? nameFromSource(source);
        if (name === undefined)
          throw fail('CLI_USAGE', { problem: `${source} gives no name; add --name`, program: 'dsec convert' });
        const here = async () => {
          const store = await openChosenStore(options, { sync: options.sync });
          const profile = await profileOf(store, options.profile);
          return reportOn(await convertToStore(store, source, name, { ...settings, profile, here: true }));
        };
        const conversion = remote === undefined ? await here() : await convertThere(remote, { source, name }, settings);
        for (const note of conversion.notes) output.note(`${conversion.name}: ${note}`);
        if (options.json) return output.json(conversion);
        await output.line(conversionText(conversion));
      });
  },
};

/**
 * What V8 compiles with its optimizing compiler, it compiles on other threads, and a conversion has work for all cores: of an image
 * that takes seconds, a tenth of them went there. So a function must have run for some tens of milliseconds first.
 */
function optimizeLate(): void {
  setFlagsFromString('--interrupt-budget=1000000');
}

/** Paths in order. A file goes before an image of that name. @throws TRACE_DAMAGED, TRACE_NONE, CATALOG_NOT_FOUND */
async function profileOf(store: BlobStore, given: string | undefined): Promise<ByteString[] | undefined> {
  if (given === undefined) return undefined;
  const bytes = await readProfile(given);
  const trace = bytes === undefined ? await traceOf(store, await openImage(store, given)) : parseTrace(bytes, given);
  return trace.files.map(({ path }) => path);
}

/** Undefined when there is no such file. @throws CLI_INPUT_*, TRACE_TOO_LARGE */
async function readProfile(path: string): Promise<Buffer | undefined> {
  try {
    const pieces: Buffer[] = [];
    let sizeBytes = 0;
    // A pipe or a device does not say how much it has.
    for await (const piece of createReadStream(nodePath(path)) as AsyncIterable<Buffer>) {
      pieces.push(piece);
      sizeBytes += piece.length;
      checkTraceSize(path, sizeBytes);
    }
    return Buffer.concat(pieces);
  } catch (error) {
    if (systemCode(error) === 'ENOENT' || systemCode(error) === 'ENOTDIR') return undefined;
    if (isDsecError(error)) throw error;
    throw inputError(path, error);
  }
}

function sizeOf(option: string, text: string | undefined): number | undefined {
  return text === undefined ? undefined : parseSize(option, text);
}

function inlineLimitOf(text: string | undefined): number | undefined {
  const limitBytes = sizeOf('--inline-limit', text);
  if (limitBytes !== undefined && limitBytes > MAX_INLINE_LIMIT_BYTES) {
    throw fail('CLI_USAGE', {
      problem: `--inline-limit ${text}: at most ${MAX_INLINE_LIMIT_BYTES} bytes fit into a block beside an inode`,
      program: 'dsec convert',
    });
  }
  return limitBytes;
}

async function showBatch(outcomes: readonly Outcome[], options: JsonOption, context: Context): Promise<void> {
  const { output } = context;
  let failed = 0;
  for (const outcome of outcomes) {
    if ('error' in outcome) {
      const { exit, code, message, hint } = reportOf(outcome.error);
      failed++;
      if (context.exitCode === 0) context.exitCode = exit;
      if (options.json)
        await output.json({ source: outcome.source, name: outcome.name, error: { code, message, hint } });
      else output.note(`dsec: ${outcome.name}: ${message}${hint === undefined ? '' : `\n      ${hint}`}`);
    } else {
      for (const note of outcome.notes) output.note(`${outcome.name}: ${note}`);
      if (options.json) await output.json(outcome);
      else await output.line(conversionText(outcome));
    }
  }
  if (failed > 0) output.note(`dsec: ${failed} of ${counted(outcomes.length, 'image')} failed`);
}

function conversionText({
  name,
  digest,
  layers: count,
  metaBytes,
  dataBytes,
  reused,
  stats,
}: ConversionReport): string {
  const layers = counted(count, 'EROFS layer');
  const size = `${humanSize(metaBytes)} metadata, ${humanSize(dataBytes)} data`;
  if (reused || stats === undefined) return `${name}: ${digest}\n${layers}, ${size}; was in the store already`;
  return `${name}: ${digest}\n${layers}, ${stats.inodes} inodes, ${size}, from ${humanSize(stats.bytesIn ?? 0)}`;
}
