/** A bounded number of tasks at once. The first failure stops the rest, and is thrown once all have ended. */
export async function inParallel<T>(
  items: readonly T[],
  limit: number,
  work: (item: T, signal: AbortSignal) => Promise<void>,
  outer?: AbortSignal,
): Promise<void> {
  const stop = new AbortController();
  const signal = outer === undefined ? stop.signal : AbortSignal.any([stop.signal, outer]);
  const queue = [...items];
  let failed = false;
  let failure: unknown;
  const worker = async () => {
    for (let item = queue.shift(); item !== undefined && !signal.aborted; item = queue.shift()) {
      try {
        await work(item, signal);
      } catch (error) {
        // What the others throw after this is only their being stopped.
        if (!failed) failure = error;
        failed = true;
        stop.abort(error);
      }
    }
  };
  await Promise.all(Array.from({ length: Math.max(1, Math.min(limit, items.length)) }, worker));
  outer?.throwIfAborted();
  if (failed) throw failure;
}
