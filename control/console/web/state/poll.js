/** Asks, shows, waits, asks again, until its end; not while nobody looks. A failure is shown and asked about again like an answer. */

/**
 * @template T
 * @param {number} ms @param {(signal: AbortSignal) => Promise<T>} ask
 * @param {(answer: T) => void} show @param {(error: unknown) => void} failed
 * @returns {{ end: () => void, now: () => void }}
 */
export function poll(ms, ask, show, failed) {
  const stop = new AbortController();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  let round = 0;
  const run = async () => {
    clearTimeout(timer);
    const mine = ++round;
    if (!document.hidden) {
      try {
        const answer = await ask(stop.signal);
        if (stop.signal.aborted || mine !== round) return;
        show(answer);
      } catch (error) {
        if (stop.signal.aborted || mine !== round) return;
        failed(error);
      }
    }
    timer = setTimeout(run, ms);
  };
  void run();
  return {
    end() {
      stop.abort();
      clearTimeout(timer);
    },
    now: () => void run(),
  };
}
