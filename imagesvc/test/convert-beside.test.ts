/**
 * Two processes that convert the same image into the same store: the registry answers neither before both have asked for a layer, so
 * that both are at it. Both get there, by the same digest, and leave nothing behind; so does one whose companion is killed.
 */
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { type Ended, killMoments, startDsec } from './killed-command.ts';
import { MadeUpRegistry } from './made-up-registry.ts';
import { writeSmallLayout } from './small-layout.ts';

const MANIFEST = 'application/vnd.oci.image.manifest.v1+json';
const KILLS = 3;

describe('conversions of one image beside each other', { timeout: 300_000 }, () => {
  let root: string;
  let env: NodeJS.ProcessEnv;
  let registry: MadeUpRegistry;
  let firstLayer: string;

  beforeAll(async () => {
    root = realpathSync(mkdtempSync(join(tmpdir(), 'dsec-beside-')));
    mkdirSync(join(root, 'tmp'));
    env = {
      DSEC_STORE: `file://${root}/store`,
      DSEC_RUN: join(root, 'run'),
      DSEC_CACHE: join(root, 'cache'),
      DSEC_STATE: join(root, 'state'),
      TMPDIR: join(root, 'tmp'),
      NODE_COMPILE_CACHE: join(root, 'compile-cache'),
    };
    registry = await MadeUpRegistry.start(false);
    firstLayer = serve(join(root, 'layout'));
    expect((await startDsec(['version'], env).ended).status).toBe(0);
  });

  afterAll(async () => {
    await registry.stop();
    rmSync(root, { recursive: true, force: true });
  });

  /** Shows the image of a layout as `small:1`; answers the digest of its first layer. */
  function serve(folder: string): string {
    writeSmallLayout(folder, 4);
    for (const hex of readdirSync(join(folder, 'blobs/sha256'))) {
      registry.blobs.set(`sha256:${hex}`, readFileSync(join(folder, 'blobs/sha256', hex)));
    }
    const index = JSON.parse(readFileSync(join(folder, 'index.json'), 'utf8')) as { manifests: { digest: string }[] };
    const bytes = registry.blobs.get(index.manifests[0]!.digest)!;
    for (const name of ['1', index.manifests[0]!.digest]) registry.manifests.set(name, { bytes, type: MANIFEST });
    return (JSON.parse(bytes.toString()) as { layers: { digest: string }[] }).layers[0]!.digest;
  }

  const staged = () => ['store/tmp', 'tmp'].flatMap((name) => names(join(root, name)));

  /** Starts both; comes back when both wait for the first layer, which `go` gives them. Options of the conversion are those of `run`. */
  async function startTwo(run: number) {
    let go = () => {};
    const gone = new Promise<void>((done) => {
      go = done;
    });
    let waiting = 0;
    const bothWait = new Promise<void>((done) => {
      registry.hold = (method, path) => {
        if (method !== 'GET' || !path.endsWith(firstLayer)) return undefined;
        if (++waiting === 2) done();
        return gone;
      };
    });
    const source = `docker://${registry.host}/small:1`;
    // Another result each time: one that is there already would be found, not made.
    const args = ['convert', source, '--name', `small:${run}`, '--inline-limit', String(100 + run), '--json'];
    const two = [startDsec(args, env), startDsec(args, env)] as const;
    await Promise.race([
      bothWait,
      ...two.map(({ ended }) => ended.then(({ stderr }) => Promise.reject(new Error(stderr)))),
    ]);
    return { two, go };
  }

  function converted({ status, stderr, stdout }: Ended): { digest: string; reused: boolean } {
    expect(status, stderr).toBe(0);
    return JSON.parse(stdout) as { digest: string; reused: boolean };
  }

  it('both succeed by the same digest and leave nothing', async () => {
    const { two, go } = await startTwo(0);
    expect(staged()).toHaveLength(2);
    go();
    const [a, b] = (await Promise.all(two.map(({ ended }) => ended))).map(converted);
    expect([a!.reused, b!.reused]).toEqual([false, false]);
    expect(b!.digest).toBe(a!.digest);
    expect(staged()).toEqual([]);
  });

  it('one goes on when the other is killed, whenever that is', async () => {
    const first = await startTwo(1);
    first.two[0].kill();
    expect((await first.two[0].ended).killed).toBe(true);
    const releasedAt = performance.now();
    first.go();
    converted(await first.two[1].ended);
    for (const [i, moment] of killMoments(KILLS, performance.now() - releasedAt, 7).entries()) {
      const { two, go } = await startTwo(2 + i);
      go();
      const timer = setTimeout(() => two[i % 2]!.kill(), moment);
      const ended = await Promise.all(two.map((one) => one.ended));
      clearTimeout(timer);
      const whole = ended.filter(({ killed }) => !killed).map(converted);
      expect(whole.length).toBeGreaterThanOrEqual(1);
      expect(new Set(whole.map(({ digest }) => digest)).size).toBe(1);
    }
    const listed = await startDsec(['images', '--json'], env).ended;
    expect(JSON.parse(listed.stdout)).toHaveLength(2 + KILLS);
    expect(staged()).toEqual([]);
    const verified = await startDsec(['verify', '--all', '--json'], env).ended;
    expect(verified.status, verified.stderr).toBe(0);
    expect((JSON.parse(verified.stdout) as { ok: boolean }[]).map(({ ok }) => ok)).toEqual(Array(2 + KILLS).fill(true));
  });
});

function names(path: string): string[] {
  return existsSync(path) ? readdirSync(path) : [];
}
