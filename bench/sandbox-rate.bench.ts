/**
 * How many sandboxes that stay a node makes and destroys in a second, over HTTP, some at a time: create, and gone with all that it had. Once more
 * with a command in each.
 */
import { availableParallelism } from 'node:os';
import { type Benchmark, type Result, round } from './benchmark.ts';
import { hasFlag, numberOption } from './options.ts';
import { summary } from './sample.ts';
import { type SandboxHost, sandboxesMissing, withSmallImage } from './sandbox-host.ts';
import { withScratch } from './work-folder.ts';

const PER_SECOND = 60;
const AT_ONCE = 4;

export const benchmark: Benchmark = {
  name: 'sandbox-rate',
  about: 'sandboxes that stay, made and destroyed, a second',
  needs: sandboxesMissing,
  run: () => withScratch('rate', (folder) => withSmallImage(folder, measure)),
};

async function measure(host: SandboxHost): Promise<Result> {
  // Its layers are there as long as it is.
  await host.create('small:1');
  const n = numberOption('n', hasFlag('full') ? 1000 : 200);
  const once = async (command: boolean) => {
    const startedAt = performance.now();
    const name = await host.create('small:1');
    if (command) await host.exec(name, ['/bin/true']);
    await host.remove(name);
    return performance.now() - startedAt;
  };
  const rate = async (command: boolean) => {
    for (let i = 0; i < 30; i++) await once(command);
    const ms: number[] = [];
    const cpuBefore = host.cpuMs();
    const startedAt = performance.now();
    let left = n;
    const work = async () => {
      while (left-- > 0) ms.push(await once(command));
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    const perSecond = round((n / (performance.now() - startedAt)) * 1000);
    return { perSecond, cpuMs: round((host.cpuMs() - cpuBefore) / n), ...summary(ms) };
  };
  const made = await rate(false);
  const used = await rate(true);
  console.log(
    `a second: ${made.perSecond} (${made.cpuMs} ms of processor time each), with a command ${used.perSecond} (${used.cpuMs} ms)`,
  );
  return {
    ratio: round(made.perSecond / PER_SECOND),
    target: `>= 1 (${PER_SECOND} a second on two cores)`,
    met: made.perSecond >= PER_SECOND,
    against: `${PER_SECOND} a second`,
    n,
    p50: made.p50,
    p99: made.p99,
    unit: 'ms',
    made,
    withCommand: used,
    atOnce: AT_ONCE,
    cores: availableParallelism(),
  };
}
