/**
 * Sandboxes that stay, as a program that keeps running has them: a `dsec serve runtime` of the benchmark's own, asked over HTTP on its
 * socket, connections kept.
 */
import { mkdirSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { SandboxClient, sandboxSocket } from '#control';
import { isMountPoint, mount } from '#linux';
import { DsecCommand } from './dsec-command.ts';
import { RuntimeServiceProcess } from './runtime-service.ts';
import { busyboxMissing, writeSmallImage } from './small-image.ts';
import { agentMissing, needsRoot } from './tool.ts';

/** What all of them need. */
export function sandboxesMissing(): string | undefined {
  return needsRoot() ?? agentMissing() ?? busyboxMissing();
}

/** A service whose store has `small:1`, an ordinary image. */
export async function withSmallImage<T>(folder: string, work: (host: SandboxHost) => Promise<T>): Promise<T> {
  const dsec = new DsecCommand(folder);
  const { layout } = await writeSmallImage(folder);
  await dsec.convert(`oci:${layout}`, 'small:1');
  const host = await SandboxHost.start(dsec);
  try {
    return await work(host);
  } finally {
    await host.stop();
  }
}

export class SandboxHost {
  readonly service: RuntimeServiceProcess;
  readonly client: SandboxClient;
  readonly #dsec: DsecCommand;
  readonly #made = new Set<string>();
  #count = 0;

  private constructor(service: RuntimeServiceProcess, dsec: DsecCommand) {
    this.service = service;
    this.#dsec = dsec;
    this.client = new SandboxClient(sandboxSocket(dsec.env.DSEC_RUN!));
  }

  static async start(dsec: DsecCommand): Promise<SandboxHost> {
    // In memory, as /run is; it goes with the benchmark's folder.
    const run = dsec.env.DSEC_RUN!;
    mkdirSync(run, { recursive: true });
    if (!isMountPoint(run)) mount('tmpfs', run, 'tmpfs', 0, 'mode=755');
    return new SandboxHost(await RuntimeServiceProcess.start(dsec), dsec);
  }

  /** Resolves when its agent answers; its name. */
  async create(
    image: string,
    more: { readonly name?: string } & Readonly<Record<string, unknown>> = {},
  ): Promise<string> {
    const name = more.name ?? `bench-${this.#count++}`;
    this.#made.add(name);
    await this.client.create({ store: this.#dsec.env.DSEC_STORE, image, ...more, name });
    return name;
  }

  /** What it wrote, when it has ended. */
  async exec(name: string, args: readonly string[]): Promise<string> {
    const { id } = await this.client.exec(name, { args });
    let output = '';
    for await (const news of this.client.output(name, id)) {
      if ('part' in news) output += news.part.bytes?.toString() ?? '';
      else if ('error' in news) throw new Error(`${args.join(' ')} in ${name}: ${news.error.message}`);
      else if (news.result.exitCode !== 0)
        throw new Error(`${args.join(' ')}: exit ${news.result.exitCode}: ${output}`);
    }
    return output;
  }

  async remove(name: string): Promise<void> {
    await this.client.remove(name, true);
    this.#made.delete(name);
  }

  /** Of the service. */
  get pid(): number {
    return this.service.pid;
  }

  get keeperPid(): number {
    const threads = `/proc/${this.pid}/task`;
    for (const thread of readdirSync(threads)) {
      for (const pid of readFileSync(join(threads, thread, 'children'), 'utf8')
        .split(' ')
        .filter(Boolean)) {
        if (readFileSync(`/proc/${pid}/comm`, 'utf8').trim() === 'dsec-keeper') return Number(pid);
      }
    }
    throw new Error('the runtime service has no keeper');
  }

  /** Of service, keeper, and all that ran in sandboxes that have ended. */
  cpuMs(): number {
    return cpuMsOf(this.pid) + cpuMsOf(this.keeperPid);
  }

  /** Until the service has done all that it does afterwards. */
  async rest(): Promise<void> {
    for (let before = -1, now = this.cpuMs(); now !== before; ) {
      await sleep(1_000);
      [before, now] = [now, this.cpuMs()];
    }
  }

  async stop(): Promise<void> {
    const names = [...this.#made];
    const work = async () => {
      for (let name = names.pop(); name !== undefined; name = names.pop()) await this.remove(name).catch(() => {});
    };
    await Promise.all(Array.from({ length: 4 }, work));
    await this.service.stop();
  }
}

/** With its children that have ended. Clock ticks are 10 ms on every Linux that Node runs on. */
function cpuMsOf(pid: number): number {
  const fields = readFileSync(`/proc/${pid}/stat`, 'utf8')
    .replace(/^.*\) /s, '')
    .split(' ');
  return fields.slice(11, 15).reduce((sum, ticks) => sum + Number(ticks), 0) * 10;
}
