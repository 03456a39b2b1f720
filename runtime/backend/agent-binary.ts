/**
 * Where the agent's program is: `dist/agent/dsec-agent`, which set-up builds from runtime/agent where there is a Rust compiler. One
 * that was built from other sources than those that lie here is not used: orders and their reader belong together.
 */
import { readFileSync, statSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

export interface AgentBinary {
  readonly path: string;
  /** Hash of its sources. */
  readonly build: string;
}

export type AgentState =
  | ({ readonly state: 'ready' } & AgentBinary)
  | { readonly state: 'missing' | 'stale'; readonly path: string };

/** The checkout, whether this is a source file or a bundle in dist/. */
export function projectRoot(): string {
  for (let folder = dirname(fileURLToPath(import.meta.url)); ; folder = dirname(folder)) {
    if (exists(join(folder, 'runtime/agent')) && exists(join(folder, 'package.json'))) return folder;
    if (folder === dirname(folder)) return folder;
  }
}

/** What scripts/agent-build.mjs has written beside it. */
interface Stamp {
  readonly build: string;
  /** Path from the root -> time and size. */
  readonly files: Readonly<Record<string, string>>;
}

export function agentState(root = projectRoot()): AgentState {
  const path = join(root, 'dist/agent/dsec-agent');
  let stamp: Stamp;
  try {
    stamp = JSON.parse(readFileSync(`${path}.json`, 'utf8')) as Stamp;
  } catch {
    return { state: 'missing', path };
  }
  if (!exists(path)) return { state: 'missing', path };
  const fresh = Object.entries(stamp.files).every(([file, state]) => fileState(join(root, file)) === state);
  return fresh ? { state: 'ready', path, build: stamp.build } : { state: 'stale', path };
}

export function findAgent(root?: string): AgentBinary | undefined {
  const found = agentState(root);
  return found.state === 'ready' ? found : undefined;
}

function fileState(path: string): string {
  const stat = statSync(path, { throwIfNoEntry: false });
  return stat === undefined ? 'missing' : `${stat.mtimeMs} ${stat.size}`;
}

function exists(path: string): boolean {
  return statSync(path, { throwIfNoEntry: false }) !== undefined;
}
