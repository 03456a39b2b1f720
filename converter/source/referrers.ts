/**
 * Manifests that name another one as their subject (distribution specification 1.1), for what belongs to an image without being a
 * part of it. A registry that keeps no list of them gets one from us, as the specification has it: an index under the tag
 * `sha256-<hex of the subject>`. Two that change such an index at the same moment may lose one entry.
 */
import { type Digest, digestOf, hexOf, isDigest } from '#base';
import { discard } from './http-client.ts';
import { MAX_DOCUMENT_BYTES } from './manifest.ts';
import { uploadManifest } from './manifest-upload.ts';
import { OCI_INDEX, OCI_MANIFEST } from './media-types.ts';
import type { RegistryRequest, RegistrySession } from './registry-session.ts';

export interface Referrer {
  readonly mediaType: string;
  readonly digest: Digest;
  readonly size: number;
  readonly artifactType?: string;
  readonly annotations?: Readonly<Record<string, string>>;
}

export interface NewReferrer {
  /** An OCI manifest with `subject`. */
  readonly bytes: Buffer;
  readonly artifactType: string;
  /** Those of the manifest. */
  readonly annotations: Readonly<Record<string, string>>;
  readonly subject: Digest;
}

const MAX_REFERRERS = 10_000;
/** What registries say that do not know the question. */
const UNKNOWN = [400, 404, 405, 501];

/** Of one artifact type, in the registry's order. Its first page: who has thousands of them has some other trouble. */
export async function listReferrers(
  session: RegistrySession,
  repository: string,
  subject: Digest,
  artifactType: string,
  signal?: AbortSignal,
): Promise<Referrer[]> {
  const path = `${repository}/referrers/${subject}?artifactType=${encodeURIComponent(artifactType)}`;
  const listed = (await fetchIndex(session, repository, path, signal)) ?? (await tagged(session, repository, subject));
  return (listed ?? []).filter((one) => one.artifactType === artifactType);
}

/** It is listed as the only one of its artifact type where the registry leaves the list to us. */
export async function putReferrer(
  session: RegistrySession,
  repository: string,
  { bytes, artifactType, annotations, subject }: NewReferrer,
  signal?: AbortSignal,
): Promise<void> {
  const digest = digestOf(bytes);
  const keepsList = await uploadManifest(session, repository, digest, bytes, OCI_MANIFEST, signal);
  if (keepsList) return;
  const others = ((await tagged(session, repository, subject, signal)) ?? []).filter(
    (one) => one.artifactType !== artifactType,
  );
  const entry: Referrer = { mediaType: OCI_MANIFEST, digest, size: bytes.length, artifactType, annotations };
  const index = { schemaVersion: 2, mediaType: OCI_INDEX, manifests: [...others, entry] };
  await uploadManifest(session, repository, tagOf(subject), Buffer.from(JSON.stringify(index)), OCI_INDEX, signal);
}

function tagOf(subject: Digest): string {
  return `sha256-${hexOf(subject)}`;
}

function tagged(session: RegistrySession, repository: string, subject: Digest, signal?: AbortSignal) {
  return fetchIndex(session, repository, `${repository}/manifests/${tagOf(subject)}`, signal);
}

/** Undefined when there is none. */
async function fetchIndex(
  session: RegistrySession,
  repository: string,
  path: string,
  signal: AbortSignal | undefined,
): Promise<Referrer[] | undefined> {
  return session.run(signal, async () => {
    const request: RegistryRequest = {
      method: 'GET',
      url: await session.url(path),
      repository,
      scope: `repository:${repository}:pull`,
      action: `referrers in ${repository}`,
      headers: { accept: OCI_INDEX },
      signal,
    };
    const response = await session.exchange(request);
    if (UNKNOWN.includes(response.status)) {
      discard(response);
      return undefined;
    }
    if (response.status !== 200) throw await session.refusal(response, request);
    const bytes = await session.read(response, request, MAX_DOCUMENT_BYTES);
    try {
      return referrersIn(JSON.parse(bytes.toString('utf8')));
    } catch {
      throw session.unexpected(request.action, 'something that is no index');
    }
  });
}

function referrersIn(index: unknown): Referrer[] {
  const listed = (index as { manifests?: unknown } | null)?.manifests;
  if (!Array.isArray(listed) || listed.length > MAX_REFERRERS) throw new Error('no list');
  return listed.flatMap((entry: Partial<Record<keyof Referrer, unknown>> | null) => {
    const { mediaType, digest, size, artifactType, annotations } = entry ?? {};
    if (!isDigest(digest) || typeof mediaType !== 'string' || !Number.isSafeInteger(size)) return [];
    return [
      {
        mediaType,
        digest,
        size: size as number,
        ...(typeof artifactType === 'string' ? { artifactType } : {}),
        ...(isTexts(annotations) ? { annotations } : {}),
      },
    ];
  });
}

function isTexts(value: unknown): value is Record<string, string> {
  return typeof value === 'object' && value !== null && Object.values(value).every((text) => typeof text === 'string');
}
