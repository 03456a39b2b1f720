/** `dsec convert --server`: what the command line says, as wishes to an image service. */
import { resolve } from 'node:path';
import type { Progress } from '#base';
import { formatPlatform, type Platform } from '#converter';
import { type BatchItem, type ClientOptions, type ConvertRequest, convertRemotely } from '#imagesvc';
import type { ConversionReport } from './conversion-report.ts';

export type Outcome = ConversionReport | { readonly source: string; readonly name: string; readonly error: unknown };

interface Settings extends Omit<ConvertRequest, 'source' | 'name' | 'platform'> {
  readonly platform?: Platform;
  readonly credentials?: string;
  readonly progress: Progress;
  readonly signal: AbortSignal;
}

/** More would only wait at the service. */
const AT_ONCE = 8;

export function convertThere(
  server: ClientOptions,
  { source, name }: BatchItem,
  settings: Settings,
): Promise<ConversionReport> {
  const { progress, signal, platform, ...shape } = settings;
  const wish = {
    ...shape,
    source: absolute(source),
    name,
    platform: platform === undefined ? undefined : formatPlatform(platform),
  };
  return convertRemotely(server, wish, { progress, signal });
}

/** All of them, in order; one that fails does not stop the others. */
export async function convertAllThere(
  server: ClientOptions,
  items: readonly BatchItem[],
  settings: Settings,
): Promise<Outcome[]> {
  const outcomes: Outcome[] = [];
  const waiting = [...items.entries()];
  const work = async () => {
    for (let next = waiting.shift(); next !== undefined; next = waiting.shift()) {
      const [index, item] = next;
      try {
        outcomes[index] = await convertThere(server, item, settings);
      } catch (error) {
        settings.signal.throwIfAborted();
        outcomes[index] = { ...item, error };
      }
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, items.length) }, work));
  return outcomes;
}

/** The service has another working directory. */
function absolute(source: string): string {
  const match = /^(oci|oci-archive|docker-archive|tar|dir):([^:]*)(.*)$/s.exec(source);
  if (match === null) return source;
  const [, scheme, path = '', rest = ''] = match;
  return path === '' ? source : `${scheme}:${resolve(path)}${rest}`;
}
