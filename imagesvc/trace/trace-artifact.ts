/**
 * How traces travel with an image through registries and image layouts: each as a blob, named by a manifest of its own whose subject is
 * the image's manifest, so that the image's digest says nothing of them. docs/traces.md has the format.
 *
 * Nothing in it is trusted: what parses is bounded, and each trace is held against the image once more when it is kept.
 */
import { type Digest, isDigest } from '#base';
import { MANIFEST_TYPE } from '../catalog/manifest.ts';
import type { Descriptor } from '../store/blob-store.ts';
import { MAX_TRACE_BYTES } from './trace.ts';
import { isTraceName } from './trace-name.ts';

export const TRACES_TYPE = 'application/vnd.dsec.traces.v1';
const TRACE_TYPE = 'application/vnd.dsec.trace.v1+json';
const NAME = 'io.dsec.trace';
/** Counts up with each change: of several manifests of one image, the later one. */
const REVISION = 'io.dsec.traces.revision';
export const MAX_CARRIED_TRACES = 64;

/** A manifest of an artifact has to have a config, so there is one that says nothing. */
export const EMPTY_CONFIG = Buffer.from('{}');
const EMPTY_DESCRIPTOR = {
  mediaType: 'application/vnd.oci.empty.v1+json',
  digest: 'sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a' as Digest,
  size: 2,
};

export interface CarriedTrace {
  readonly name: string;
  readonly blob: Descriptor;
}

export interface CarriedTraces {
  readonly revision: number;
  readonly traces: readonly CarriedTrace[];
}

export function emptyConfig(): Descriptor {
  return EMPTY_DESCRIPTOR;
}

export function carriedTrace(name: string, digest: Digest, size: number): CarriedTrace {
  return { name, blob: { mediaType: TRACE_TYPE, digest, size } };
}

export function tracesAnnotations(revision: number): Record<string, string> {
  return { [REVISION]: String(revision) };
}

/** The same traces and revision, the same bytes. */
export function buildTracesManifest(image: { digest: Digest; size: number }, { revision, traces }: CarriedTraces) {
  return Buffer.from(
    JSON.stringify({
      schemaVersion: 2,
      mediaType: MANIFEST_TYPE,
      artifactType: TRACES_TYPE,
      config: EMPTY_DESCRIPTOR,
      layers: traces.map(({ name, blob: { mediaType, digest, size } }) => ({
        mediaType,
        digest,
        size,
        annotations: { [NAME]: name },
      })),
      subject: { mediaType: MANIFEST_TYPE, digest: image.digest, size: image.size },
      annotations: tracesAnnotations(revision),
    }),
  );
}

/** Undefined for what is no such manifest of this image. Entries that are none of ours are left out. */
export function parseTracesManifest(bytes: Buffer, image: Digest): CarriedTraces | undefined {
  let value: Record<string, unknown>;
  try {
    value = JSON.parse(bytes.toString('utf8')) as Record<string, unknown>;
  } catch {
    return undefined;
  }
  const { artifactType, layers, subject, annotations } = value ?? {};
  if (artifactType !== TRACES_TYPE || field(subject, 'digest') !== image || !Array.isArray(layers)) return undefined;
  const revision = Number(field(annotations, REVISION) ?? 0);
  const traces = layers.slice(0, MAX_CARRIED_TRACES).flatMap((layer: unknown) => {
    const [digest, size, name] = [
      field(layer, 'digest'),
      field(layer, 'size'),
      field(field(layer, 'annotations'), NAME),
    ];
    if (field(layer, 'mediaType') !== TRACE_TYPE || !isDigest(digest) || !isTraceName(name)) return [];
    if (!Number.isSafeInteger(size) || (size as number) < 1 || (size as number) > MAX_TRACE_BYTES) return [];
    return [carriedTrace(name, digest, size as number)];
  });
  return { revision: Number.isSafeInteger(revision) && revision >= 0 ? revision : 0, traces };
}

/** One of each name, those of the first that has it. */
export function joinTraces(lists: readonly (readonly CarriedTrace[])[]): CarriedTrace[] {
  const byName = new Map<string, CarriedTrace>();
  for (const trace of lists.flat()) if (!byName.has(trace.name)) byName.set(trace.name, trace);
  return [...byName.values()].slice(0, MAX_CARRIED_TRACES).sort((a, b) => (a.name < b.name ? -1 : 1));
}

function field(value: unknown, name: string): unknown {
  return typeof value === 'object' && value !== null ? (value as Record<string, unknown>)[name] : undefined;
}
