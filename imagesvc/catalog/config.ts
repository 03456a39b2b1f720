/** The OCI config of an image: what it says about running it, read with doubt, for it comes from whoever made the image. */
import { fail } from '../errors.ts';
import type { BlobStore } from '../store/blob-store.ts';
import type { Image, OciConfig } from './image.ts';

/** @throws CATALOG_CONFIG, which names the field; STORE_BLOB_MISSING, STORE_DIGEST_MISMATCH */
export async function readConfig(store: BlobStore, image: Image): Promise<OciConfig> {
  return parseConfig(await store.readVerified(image.config.digest), image);
}

export function parseConfig(bytes: Buffer, image: Pick<Image, 'name' | 'config'>): OciConfig {
  const wrong = (why: string) => fail('CATALOG_CONFIG', { digest: image.config.digest, name: image.name, why });
  let value: unknown;
  try {
    value = JSON.parse(bytes.toString('utf8'));
  } catch {
    throw wrong('is not JSON');
  }
  const isFields = (it: unknown): it is Record<string, unknown> =>
    typeof it === 'object' && it !== null && !Array.isArray(it);
  if (!isFields(value)) throw wrong('is not a JSON object');
  const expectText = (fields: Record<string, unknown>, names: readonly string[], where: string) => {
    for (const name of names) {
      if (fields[name] !== undefined && typeof fields[name] !== 'string')
        throw wrong(`${where}${name} must be a string`);
    }
  };
  const expectList = (fields: Record<string, unknown>, names: readonly string[], where: string, nullToo: boolean) => {
    for (const name of names) {
      const list = fields[name];
      if (list === undefined || (nullToo && list === null)) continue;
      if (!Array.isArray(list) || list.some((item) => typeof item !== 'string'))
        throw wrong(`${where}${name} must be a list of strings`);
    }
  };
  expectText(value, ['architecture', 'os', 'variant'], '');
  const { config, rootfs, ...rest } = value;
  const parsed: Record<string, unknown> = rest;
  // Docker writes null where it has nothing to say.
  if (config !== undefined && config !== null) {
    if (!isFields(config)) throw wrong('config must be an object');
    const run = Object.fromEntries(
      Object.entries(config).filter(([name, it]) => it !== null || ['Entrypoint', 'Cmd', 'Labels'].includes(name)),
    );
    expectText(run, ['User', 'WorkingDir', 'StopSignal'], 'config.');
    expectList(run, ['Env', 'Entrypoint', 'Cmd'], 'config.', true);
    if (run.Labels !== undefined && run.Labels !== null) {
      if (!isFields(run.Labels)) throw wrong('config.Labels must be an object');
      expectText(run.Labels, Object.keys(run.Labels), 'config.Labels.');
    }
    parsed.config = run;
  }
  if (rootfs !== undefined && rootfs !== null) {
    if (!isFields(rootfs)) throw wrong('rootfs must be an object');
    expectText(rootfs, ['type'], 'rootfs.');
    expectList(rootfs, ['diff_ids'], 'rootfs.', true);
    parsed.rootfs = rootfs;
  }
  return parsed as OciConfig;
}
