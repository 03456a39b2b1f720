/**
 * What a trace is worth: `dsec run` of a command that reads hundreds of files, scattered over an image with many more, from an S3
 * server that is 5 and 20 ms away; with the trace of an earlier start in the store, against --no-prefetch. Caches are cold each
 * time: every run is the first one of a node of its own. Beside it, not part of the ratio: the same image laid out by that trace
 * (`dsec convert --profile`), with a trace of its own.
 */
import { createCipheriv } from 'node:crypto';
import { copyFileSync, mkdirSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { stopDataServers } from '#imagesvc';
import { atLeast, type Benchmark, type Result } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { barChart } from './figures/svg.ts';
import { LimitedLink } from './limited-link.ts';
import { findS3Server, LoopbackServer, S3_KEYS, S3_MISSING, s3Url } from './loopback-servers.ts';
import { numberOption } from './options.ts';
import { printTable, saveFigure } from './results.ts';
import { inTurn, type Summary, summary } from './sample.ts';
import { busyboxMissing, findBusybox } from './small-image.ts';
import { missingTool, needsRoot } from './tool.ts';
import { needSpace, withScratch } from './work-folder.ts';

const TARGET = 2;
const LATENCIES_MS = [5, 20];
const FILES = 8000;
const READ_FILES = 500;
const COMMAND = ['sh', '-c', 'xargs cat < /list | wc -c'];
const MIB = 2 ** 20;

export const benchmark: Benchmark = {
  name: 'prefetch-start',
  about: 'a cold start with the trace of an earlier one, against one without, on an S3 server 5 and 20 ms away',
  needs: () =>
    needsRoot() ??
    (findS3Server() === undefined ? S3_MISSING : undefined) ??
    missingTool({ crun: 'crun' }) ??
    busyboxMissing(),
  run: () => withScratch('prefetch', measure),
};

interface Measured {
  readonly ratio: number;
  readonly traced: Summary;
  readonly untraced: Summary;
  /** With a trace, of the image that was laid out by it. */
  readonly laid: Summary;
}

async function measure(folder: string): Promise<Result> {
  needSpace(folder, 1500 * MIB);
  const n = numberOption('n', 5);
  const dsec = new DsecCommand(folder);
  const server = await LoopbackServer.startS3(folder);
  try {
    const tree = join(folder, 'tree');
    const expected = writeTree(tree);
    const direct = { ...S3_KEYS, DSEC_STORE: s3Url(server.host) };
    await dsec.convert(`dir:${tree}`, 'many:1', [], { env: direct });
    await dsec.run(['trace', 'many:1', '--', ...COMMAND], { env: direct });
    await dsec.convert(`dir:${tree}`, 'laid:1', ['--profile', 'many:1'], { env: direct });
    await dsec.run(['trace', 'laid:1', '--', ...COMMAND], { env: direct });
    rmSync(tree, { recursive: true });
    const details: Record<string, Measured> = {};
    for (const latencyMs of LATENCIES_MS) {
      const link = await LimitedLink.start(server.host, { bytesPerSecond: 10_000 * MIB, latencyMs });
      try {
        const start = (args: readonly string[]) => () =>
          coldStart(dsec, join(folder, 'node'), s3Url(link.host), args, expected);
        const traced = start(['many:1']);
        await traced();
        const { ours, theirs, ratio } = await inTurn(n, traced, start(['--no-prefetch', 'many:1']));
        const laid: number[] = [];
        for (let i = 0; i < n; i++) laid.push(await start(['laid:1'])());
        details[`${latencyMs} ms`] = {
          ratio,
          traced: summary(ours),
          untraced: summary(theirs),
          laid: summary(laid),
        };
      } finally {
        await link.stop();
      }
    }
    printTable([
      ['latency', 'with trace', 'without', 'ratio', 'laid out, with trace'],
      ...Object.entries(details).map(([latency, { traced, untraced, laid, ratio }]) => [
        latency,
        `${traced.p50} ms`,
        `${untraced.p50} ms`,
        String(ratio),
        `${laid.p50} ms`,
      ]),
    ]);
    const worst = Object.values(details).reduce((a, b) => (a.ratio < b.ratio ? a : b));
    const figure = saveFigure(
      'prefetch-start',
      barChart({
        title: `A cold start that reads ${READ_FILES} of ${FILES} files: median`,
        unit: 'ms',
        series: ['with a trace', 'without', 'laid out by it'],
        groups: Object.entries(details).map(([latency, { traced, untraced, laid }]) => ({
          label: `store ${latency} away`,
          values: [traced.p50, untraced.p50, laid.p50],
        })),
      }),
    );
    return {
      ratio: worst.ratio,
      ...atLeast(TARGET, worst.ratio),
      against: 'dsec run --no-prefetch; versitygw behind a link with latency',
      n,
      p50: worst.traced.p50,
      p99: worst.traced.p99,
      unit: 'ms',
      latencies: details,
      figure,
    };
  } finally {
    await server.stop();
  }
}

/** On a node that has never seen the image. Milliseconds from the command line to its end. */
async function coldStart(
  dsec: DsecCommand,
  node: string,
  store: string,
  args: readonly string[],
  expected: number,
): Promise<number> {
  const folders = { runDir: join(node, 'run'), cacheDir: join(node, 'cache') };
  const env = {
    ...S3_KEYS,
    DSEC_STORE: store,
    DSEC_RUN: folders.runDir,
    DSEC_CACHE: folders.cacheDir,
    DSEC_STATE: join(node, 'state'),
  };
  try {
    const { ms, stdout } = await dsec.run(['run', ...args, '--', ...COMMAND], { env });
    if (Number(stdout) !== expected) throw new Error(`it read ${stdout.trim()} bytes, not ${expected}`);
    return ms;
  } finally {
    await stopDataServers({ ...folders, force: true });
    rmSync(node, { recursive: true, force: true });
  }
}

/** Files of 16 to 48 KiB in folders of a hundred; a list of those that are read, in no order. Returns how many bytes these have. */
function writeTree(root: string): number {
  for (const name of ['bin', 'dev', 'etc', 'proc', 'sys', 'tmp']) mkdirSync(join(root, name), { recursive: true });
  copyFileSync(findBusybox()!, join(root, 'bin/busybox'));
  for (const applet of ['sh', 'cat', 'xargs', 'wc']) symlinkSync('busybox', join(root, 'bin', applet));
  const noise = createCipheriv('aes-128-ctr', Buffer.alloc(16, 1), Buffer.alloc(16));
  const step = FILES / READ_FILES;
  const list: string[] = [];
  let bytes = 0;
  for (let i = 0; i < FILES; i++) {
    const folder = join(root, 'many', String(Math.floor(i / 100)));
    if (i % 100 === 0) mkdirSync(folder, { recursive: true });
    const size = 16_384 + ((i * 7919) % 32_768);
    writeFileSync(join(folder, String(i)), noise.update(Buffer.alloc(size)));
    if (i % step !== 0) continue;
    list.push(`/many/${Math.floor(i / 100)}/${i}`);
    bytes += size;
  }
  // 7 and the number of files have no common divisor.
  writeFileSync(join(root, 'list'), `${list.map((_, i) => list[(i * 7) % list.length]).join('\n')}\n`);
  return bytes;
}
