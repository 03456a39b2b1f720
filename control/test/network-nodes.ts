/** Machines of a test, as network namespaces beside each other on a bridge: each has an address of its own, and its link can be taken down. */
import { execFileSync } from 'node:child_process';

const run = (program: string, ...args: string[]) => execFileSync(program, args, { stdio: ['ignore', 'pipe', 'pipe'] });

export class NetworkNodes {
  /** Of this side, which all of them reach. */
  readonly here: string;
  private readonly mark = `d${process.pid.toString(36)}`;
  private readonly subnet: string;
  private readonly made: string[] = [];

  constructor() {
    // Of the range for tests between networks (RFC 2544), which nobody has.
    this.subnet = `198.18.${process.pid % 250}`;
    this.here = `${this.subnet}.1`;
    run('ip', 'link', 'add', this.bridge, 'type', 'bridge');
    run('ip', 'address', 'add', `${this.here}/24`, 'dev', this.bridge);
    run('ip', 'link', 'set', this.bridge, 'up');
  }

  private get bridge(): string {
    return `${this.mark}br`;
  }

  /** Its address. */
  add(node: string, number: number): string {
    const [name, link, inside] = [this.name(node), this.link(node), `${this.mark}i${node}`];
    const address = `${this.subnet}.${10 + number}`;
    run('ip', 'netns', 'add', name);
    this.made.push(node);
    run('ip', 'link', 'add', link, 'type', 'veth', 'peer', 'name', inside, 'netns', name);
    run('ip', 'link', 'set', link, 'master', this.bridge, 'up');
    run('ip', '-n', name, 'address', 'add', `${address}/24`, 'dev', inside);
    run('ip', '-n', name, 'link', 'set', inside, 'up');
    run('ip', '-n', name, 'link', 'set', 'lo', 'up');
    return address;
  }

  /** To be put before a command that runs there; mounts are everybody's. */
  at(node: string): string[] {
    return ['nsenter', `--net=/run/netns/${this.name(node)}`];
  }

  connected(node: string, on: boolean): void {
    run('ip', 'link', 'set', this.link(node), on ? 'up' : 'down');
  }

  remove(): void {
    for (const node of this.made) run('ip', 'netns', 'delete', this.name(node));
    run('ip', 'link', 'delete', this.bridge);
  }

  private name(node: string): string {
    return `${this.mark}-${node}`;
  }

  private link(node: string): string {
    return `${this.mark}o${node}`;
  }
}
