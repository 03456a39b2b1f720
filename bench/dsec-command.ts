/**
 * dsec as its users have it: `bin/dsec` as a process, with a store and node state of its own in a benchmark's folder.
 */
import { existsSync } from 'node:fs';
import { rm } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { type CommandOptions, type Measured, timedCommand } from './timed-command.ts';

export interface ConvertedJson {
  readonly digest: string;
  readonly layers: number;
  readonly metaBytes: number;
  readonly dataBytes: number;
  /** All blobs: metadata, data, chunk digests, config, manifest. */
  readonly sizeBytes: number;
  readonly stats?: { readonly bytesIn: number; readonly tarBytes: number; readonly inodes: number };
}

export class DsecCommand {
  readonly program = join(projectRoot(), 'bin/dsec');
  readonly store: string;
  readonly env: NodeJS.ProcessEnv;

  constructor(folder: string) {
    this.store = join(folder, 'store');
    this.env = {
      DSEC_STORE: `file://${this.store}`,
      DSEC_RUN: join(folder, 'run'),
      DSEC_CACHE: join(folder, 'node-cache'),
      DSEC_STATE: join(folder, 'state'),
    };
  }

  /** The bundle is built, and what it is made of is in the page cache. */
  async warmUp(): Promise<void> {
    for (let i = 0; i < 2; i++) await this.run(['version']);
  }

  argv(args: readonly string[]): string[] {
    return [process.execPath, this.program, ...args];
  }

  run(args: readonly string[], options: CommandOptions = {}): Promise<Measured> {
    return timedCommand(this.argv(args), { ...options, env: { ...this.env, ...options.env } });
  }

  async convert(
    source: string,
    name: string,
    args: readonly string[] = [],
    options: CommandOptions = {},
  ): Promise<Measured & { readonly image: ConvertedJson }> {
    const measured = await this.run(['convert', source, '--name', name, '--json', ...args], options);
    return { ...measured, image: JSON.parse(measured.stdout) as ConvertedJson };
  }

  /** The next conversion starts from nothing. */
  async emptyStore(): Promise<void> {
    await rm(this.store, { recursive: true, force: true });
  }
}

/** Bundled or not, this code lies somewhere below the checkout. */
export function projectRoot(): string {
  let folder = dirname(fileURLToPath(import.meta.url));
  while (!existsSync(join(folder, 'bin/dsec')) && folder !== '/') folder = dirname(folder);
  return folder;
}
