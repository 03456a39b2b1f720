/** Publishes a manifest under a tag or its digest; the blobs that it names must be there. */
import { discard } from './http-client.ts';
import type { RegistryRequest, RegistrySession } from './registry-session.ts';

/** Whether the registry says that it keeps a list of what has the manifest's subject (distribution specification 1.1). */
export function uploadManifest(
  session: RegistrySession,
  repository: string,
  reference: string,
  bytes: Buffer,
  mediaType: string,
  signal: AbortSignal | undefined,
): Promise<boolean> {
  return session.run(signal, async () => {
    const request: RegistryRequest = {
      method: 'PUT',
      url: await session.url(`${repository}/manifests/${reference}`),
      repository,
      scope: `repository:${repository}:pull,push`,
      action: `upload of manifest ${reference} to ${repository}`,
      headers: { 'content-type': mediaType, 'content-length': String(bytes.length) },
      body: () => bytes,
      signal,
    };
    const response = await session.exchange(request);
    if (![200, 201, 202].includes(response.status)) throw await session.refusal(response, request);
    const noted = response.header('oci-subject') !== undefined;
    discard(response);
    return noted;
  });
}
