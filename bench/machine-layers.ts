/**
 * gzip layers made of what this machine has: its /usr and this project's node_modules, walked in byte order, written by
 * tar and compressed by gzip -6 as image builders do. Kept in the cache folder, since compressing takes longer than
 * everything that is measured with the result.
 */
import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { once } from 'node:events';
import {
  createWriteStream,
  existsSync,
  lstatSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { Transform } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { type ByteString, bytesOf, type Digest, digestFromHex, fromText, humanSize } from '#base';
import { projectRoot } from './dsec-command.ts';
import { fail } from './errors.ts';
import { cacheFolder } from './work-folder.ts';

const MIB = 2 ** 20;

export interface MachineLayer {
  readonly path: string;
  readonly digest: Digest;
  readonly diffId: Digest;
  readonly sizeBytes: number;
  readonly tarBytes: number;
  readonly members: number;
  readonly compressed: true;
}

/** `count` layers with nothing in common, each of at least `mib` MiB compressed. */
export async function machineLayers(count: number, mib: number): Promise<MachineLayer[]> {
  const folder = join(cacheFolder(), `layers-${count}x${mib}`);
  const record = join(folder, 'layers.json');
  if (existsSync(record)) return JSON.parse(readFileSync(record, 'utf8')) as MachineLayer[];
  const staging = `${folder}.${process.pid}`;
  mkdirSync(staging, { recursive: true });
  try {
    const members = new Members();
    const layers: MachineLayer[] = [];
    // Bytes of tar for a byte of gzip: a guess, then what the machine's files turned out to give.
    let gain = 3;
    for (let i = 0; i < count; i++) {
      const want = mib * MIB;
      const paths: ByteString[] = [];
      for (let have = 0; have < want; ) {
        const more = members.take(Math.max(MIB, (want - have) * gain * 1.05));
        if (more.length === 0)
          throw fail('BENCH_CORPUS', { what: 'the layers', have: humanSize(have), want: humanSize(want) });
        paths.push(...more);
        const made = await writeLayer(paths, join(staging, `layer-${i}.tar.gz`));
        console.log(
          `layer ${i + 1}/${count}: ${made.members} members, ${humanSize(made.tarBytes)} of tar, ${humanSize(made.sizeBytes)} of gzip`,
        );
        have = made.sizeBytes;
        gain = made.tarBytes / made.sizeBytes;
        if (have >= want) layers.push({ ...made, path: join(folder, `layer-${i}.tar.gz`) });
      }
    }
    writeFileSync(join(staging, 'layers.json'), JSON.stringify(layers, undefined, 1));
    rmSync(folder, { recursive: true, force: true });
    renameSync(staging, folder);
    return layers;
  } finally {
    rmSync(staging, { recursive: true, force: true });
  }
}

/** Reads the layers once, so that no side of a comparison pays for the disk. */
export function warmLayers(layers: readonly MachineLayer[]): void {
  for (const layer of layers) readFileSync(layer.path);
}

/** Everything below some folders, depth first in byte order. */
class Members {
  readonly #walk: Generator<{ path: ByteString; sizeBytes: number }>;

  constructor(roots: readonly string[] = ['/usr', join(projectRoot(), 'node_modules')]) {
    this.#walk = (function* () {
      for (const root of roots) if (existsSync(root)) yield* walk(fromText(root));
    })();
  }

  /** The next ones, with at least so many bytes in them. Fewer at the end. */
  take(wantBytes: number): ByteString[] {
    const paths: ByteString[] = [];
    for (let bytes = 0; bytes < wantBytes; ) {
      const next = this.#walk.next();
      if (next.done) break;
      paths.push(next.value.path);
      bytes += next.value.sizeBytes;
    }
    return paths;
  }
}

function* walk(path: ByteString): Generator<{ path: ByteString; sizeBytes: number }> {
  const stat = lstatSync(bytesOf(path), { throwIfNoEntry: false });
  if (stat === undefined) return;
  if (!stat.isDirectory()) {
    if (stat.isFile() || stat.isSymbolicLink()) yield { path, sizeBytes: 512 + stat.size };
    return;
  }
  yield { path, sizeBytes: 512 };
  const names = readdirSync(bytesOf(path), { encoding: 'latin1' }).sort();
  for (const name of names) yield* walk(`${path}/${name}`);
}

/** Of exactly these paths: absolute ones, seen from `root`. */
export async function writeLayer(paths: readonly ByteString[], file: string, root = '/'): Promise<MachineLayer> {
  const tar = spawn(
    'tar',
    ['--create', '--format=gnu', '--numeric-owner', '--no-recursion', '--null', '--no-unquote', '-C', root, '-T', '-'],
    { stdio: ['pipe', 'pipe', 'ignore'] },
  );
  const gzip = spawn('gzip', ['-6', '-n', '-c'], { stdio: ['pipe', 'pipe', 'inherit'] });
  // Names without the leading slash: tar would say for each that it cut it off.
  tar.stdin.on('error', () => {});
  tar.stdin.end(bytesOf(paths.map((path) => `${path.slice(1)}\0`).join('')));
  const ended = Promise.all([once(tar, 'close'), once(gzip, 'close')]);
  const plain = new Meter();
  const packed = new Meter();
  await Promise.all([pipeline(tar.stdout, plain, gzip.stdin), pipeline(gzip.stdout, packed, createWriteStream(file))]);
  const [[tarStatus], [gzipStatus]] = await ended;
  // 1: a file changed while it was read. The layer is whole all the same.
  if (tarStatus > 1 || gzipStatus !== 0) {
    throw fail('BENCH_COMMAND', { command: 'tar | gzip', status: `${tarStatus}, ${gzipStatus}`, output: '' });
  }
  return {
    path: file,
    digest: packed.digest(),
    diffId: plain.digest(),
    sizeBytes: statSync(file).size,
    tarBytes: plain.sizeBytes,
    members: paths.length,
    compressed: true,
  };
}

/** Lets bytes through and takes their digest. */
class Meter extends Transform {
  readonly #hash = createHash('sha256');
  sizeBytes = 0;

  override _transform(bytes: Buffer, _encoding: string, done: (error: null, bytes: Buffer) => void): void {
    this.#hash.update(bytes);
    this.sizeBytes += bytes.length;
    done(null, bytes);
  }

  digest(): Digest {
    return digestFromHex(this.#hash.digest('hex'));
  }
}
