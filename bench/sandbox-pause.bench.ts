/**
 * A sandbox of 200 MiB is paused: how much of its memory goes back to the machine, which has a zram device of the benchmark's own for it; and how
 * long the first answer takes after that: of a new command (which resumes it), of a process that was in swap, and of all 200 MiB.
 */
import { copyFileSync, mkdirSync, openSync, readFileSync, symlinkSync, truncateSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { atLeast, type Benchmark, type Result, round } from './benchmark.ts';
import { DsecCommand } from './dsec-command.ts';
import { numberOption } from './options.ts';
import { summary } from './sample.ts';
import { SandboxHost, sandboxesMissing } from './sandbox-host.ts';
import { findBusybox } from './small-image.ts';
import { withScratch } from './work-folder.ts';
import { ZramSwap, zramMissing } from './zram-swap.ts';

const TARGET = 0.9;
const MEMORY_BYTES = 200 << 20;
const APPLETS = ['sh', 'true', 'dd', 'cat', 'echo', 'rm', 'wc', 'mkfifo', 'sleep', 'test'];

export const benchmark: Benchmark = {
  name: 'sandbox-pause',
  about: 'memory that a paused sandbox of 200 MiB gives back, and the first answer after it',
  needs: () => sandboxesMissing() ?? zramMissing(),
  run: () => withScratch('pause', measure),
};

async function measure(folder: string): Promise<Result> {
  const dsec = new DsecCommand(folder);
  await dsec.convert(`dir:${writeTree(folder)}`, 'memory:1');
  const swap = ZramSwap.start(1 << 30);
  try {
    const host = await SandboxHost.start(dsec);
    try {
      return await measured(host, swap, numberOption('n', 7));
    } finally {
      await host.stop();
    }
  } finally {
    swap.stop();
  }
}

async function measured(host: SandboxHost, swap: ZramSwap, n: number): Promise<Result> {
  const name = await host.create('memory:1');
  const { client } = host;
  const timed = async (work: () => Promise<unknown>) => {
    const startedAt = performance.now();
    await work();
    return performance.now() - startedAt;
  };
  const freed: number[] = [];
  const times = {
    running: [] as number[],
    first: [] as number[],
    swapped: [] as number[],
    whole: [] as number[],
    pause: [] as number[],
  };
  let memory = { beforeBytes: 0, afterBytes: 0 };
  let compressed = 0;
  for (let run = 0; run < n; run++) {
    // A shell that answers a line with a line, and a program that has 200 MiB and hands them on when it is told to.
    await host.exec(name, ['sh', '-c', 'rm -f /tmp/ask /tmp/answer /tmp/go; mkfifo /tmp/ask /tmp/answer /tmp/go']);
    const answers = 'exec 3<>/tmp/ask 4<>/tmp/answer; while read x; do echo $x >&4; done <&3';
    const holds = `dd if=/data bs=${MEMORY_BYTES} count=1 2>/dev/null | { read x </tmp/go; wc -c; }`;
    await client.exec(name, { args: ['sh', '-c', answers], background: true });
    const holder = await client.exec(name, { args: ['sh', '-c', holds], background: true });
    await host.exec(name, ['sh', '-c', 'echo warm >/tmp/ask; read x </tmp/answer']);
    await host.exec(name, [
      'sh',
      '-c',
      `while :; do for p in /proc/[0-9]*/status; do (while read k v u; do test "$k" = VmRSS: && test $v -gt 200000 && exit 0; done <$p; exit 1) 2>/dev/null && exit; done; sleep 0.1; done`,
    ]);
    const ask = () => host.exec(name, ['sh', '-c', 'echo word >/tmp/ask; read x </tmp/answer; echo $x']);
    await ask();
    times.running.push(await timed(() => host.exec(name, ['true'])));
    const before = swap.memoryBytes();
    times.pause.push(
      await timed(async () => {
        memory = await client.pause(name);
      }),
    );
    compressed = swap.memoryBytes() - before;
    freed.push((memory.beforeBytes - memory.afterBytes) / memory.beforeBytes);
    times.first.push(await timed(() => host.exec(name, ['true'])));
    times.swapped.push(await timed(ask));
    times.whole.push(
      await timed(async () => {
        await host.exec(name, ['sh', '-c', 'echo >/tmp/go']);
        for await (const news of client.output(name, holder.id))
          if ('error' in news) throw new Error(news.error.message);
      }),
    );
    await host.exec(name, ['sh', '-c', 'echo >/tmp/ask']);
  }
  const [first, running] = [summary(times.first), summary(times.running)];
  const ratio = round(Math.min(...freed));
  console.log(
    `given back: ${round(100 * ratio)} % of ${round(memory.beforeBytes / (1 << 20))} MiB, which take ${round(compressed / (1 << 20))} MiB in zram; ` +
      `first answer ${first.p50} ms (running: ${running.p50} ms), of a process in swap ${summary(times.swapped).p50} ms`,
  );
  return {
    ratio,
    ...atLeast(TARGET, ratio),
    against: 'its own memory before, by its control group; the least of all runs',
    n,
    p50: first.p50,
    p99: first.p99,
    unit: 'ms',
    beforeBytes: memory.beforeBytes,
    afterBytes: memory.afterBytes,
    zramBytes: compressed,
    netRatio: round((memory.beforeBytes - memory.afterBytes - compressed) / memory.beforeBytes),
    pauseMs: summary(times.pause),
    firstAnswerMs: first,
    runningMs: running,
    swappedAnswerMs: summary(times.swapped),
    allReadMs: summary(times.whole),
  };
}

/** Busybox, and 200 MiB of this machine's programs. */
function writeTree(folder: string): string {
  const tree = join(folder, 'tree');
  for (const name of ['bin', 'tmp', 'proc', 'dev', 'sys', 'etc']) mkdirSync(join(tree, name), { recursive: true });
  copyFileSync(findBusybox()!, join(tree, 'bin/busybox'));
  for (const applet of APPLETS) symlinkSync('busybox', join(tree, 'bin', applet));
  const bytes = readFileSync(process.execPath);
  const fd = openSync(join(tree, 'data'), 'w');
  for (let at = 0; at < MEMORY_BYTES; at += bytes.length) writeSync(fd, bytes);
  truncateSync(join(tree, 'data'), MEMORY_BYTES);
  return tree;
}
