/** A node for sandboxes that stay, with small limits for kept output, and what tests of it ask again and again. */
import { setTimeout as delay } from 'node:timers/promises';
import type { Image } from '#imagesvc';
import { findAgent } from '../backend/agent-binary.ts';
import { allMembersOf, cgroupsOf } from '../backend/cgroup-cleanup.ts';
import type { CreateOptions } from '../node/create-sandbox.ts';
import type { NodeSandbox } from '../node/node-sandbox.ts';
import { type NodeOptions, SandboxNode } from '../node/sandbox-node.ts';
import type { ExecHandle, ExecSpec } from '../sandbox-api/exec.ts';
import { TEST_IMAGES } from './resident-images.ts';
import { Site } from './sandbox-fixture.ts';

export const HEAD = 1 << 20;
export const TAIL = 1 << 20;

export class ResidentSite {
  readonly site: Site;
  node: SandboxNode;
  readonly image: Image;
  private count = 0;

  private readonly options: Partial<NodeOptions>;

  private constructor(site: Site, node: SandboxNode, image: Image, options: Partial<NodeOptions>) {
    this.options = options;
    this.site = site;
    this.node = node;
    this.image = image;
  }

  static async open(imageName = 'busybox', options: Partial<NodeOptions> = {}): Promise<ResidentSite> {
    const site = await new Site().open();
    const { name, fill } = TEST_IMAGES.find((one) => one.name === imageName)!;
    return new ResidentSite(site, await openNode(site, options), await site.image(`${name}:1`, [fill]), options);
  }

  create(options: Partial<CreateOptions> = {}): Promise<NodeSandbox> {
    return this.node.create({ store: this.site.store, base: this.image, name: `s${this.count++}`, ...options });
  }

  /** As a service that is killed and started again. */
  async restart(): Promise<void> {
    await this.node.close();
    this.node = await openNode(this.site, this.options);
  }

  async remove(): Promise<void> {
    await Promise.all(this.node.list().map((sandbox) => sandbox.stop({ timeMs: 0 })));
    await this.node.close();
    await this.site.remove();
  }
}

function openNode(site: Site, options: Partial<NodeOptions>): Promise<SandboxNode> {
  const spoolLimits = { headBytes: HEAD, tailBytes: TAIL };
  return SandboxNode.open({ agent: findAgent()!, folders: site.folders, spoolLimits, ...options });
}

export interface Told {
  stdout: string;
  stderr: string;
  missing: number;
}

export async function told(command: ExecHandle, from?: Parameters<ExecHandle['output']>[0]): Promise<Told> {
  const all: Told = { stdout: '', stderr: '', missing: 0 };
  for await (const part of command.output(from)) {
    if (part.bytes === undefined) all.missing += part.missingBytes;
    else all[part.stream] += part.bytes.toString('latin1');
  }
  return all;
}

export async function say(sandbox: NodeSandbox, script: string, spec: Partial<ExecSpec> = {}): Promise<string> {
  const command = await sandbox.exec({ args: ['sh', '-c', script], ...spec });
  return (await told(command)).stdout;
}

/** Processes of this machine that are in the sandbox, its agent with them: on v2 none is in its own group, all are in groups below. */
export function processesOf(sandbox: NodeSandbox): number[] {
  return [...new Set(cgroupsOf(sandbox.facts.id).flatMap((group) => allMembersOf(group)))];
}

export async function until(what: string, holds: () => boolean | Promise<boolean>): Promise<void> {
  const deadline = Date.now() + 60_000;
  while (!(await holds())) {
    if (Date.now() > deadline) throw new Error(`it did not happen in a minute: ${what}`);
    await delay(10);
  }
}
