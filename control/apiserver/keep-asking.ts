/** Reservations whose edge works on them for long: asked for again and again, so that its roster does not end them meanwhile. */
import { isDsecError } from '#base';
import type { Iam } from '../iam/iam.ts';

/** Well within the time for which a roster without them is no reason to end them. */
const EVERY_MS = 20_000;

export async function whileAsking<T>(
  { iam, note, everyMs = EVERY_MS }: { iam: Pick<Iam, 'asking'>; note: (problem: string) => void; everyMs?: number },
  ids: readonly string[],
  edge: string,
  work: () => Promise<T>,
): Promise<T> {
  let renewing: Promise<unknown> = Promise.resolve();
  const renew = (id: string) =>
    iam.asking(id, edge).catch((error: unknown) => {
      // One that is gone: its sandbox is not kept.
      if (!isDsecError(error, 'IAM_RESERVATION_GONE')) note(`reservation ${id}: ${String(error)}`);
    });
  const timer = setInterval(() => {
    renewing = Promise.all(ids.map(renew));
  }, everyMs).unref();
  try {
    return await work();
  } finally {
    clearInterval(timer);
    await renewing;
  }
}
