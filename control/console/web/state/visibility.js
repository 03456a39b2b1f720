/**
 * Streams are held only while somebody looks: a browser has six connections to a server for all its tabs together, and tabs in the background that
 * kept theirs would leave none for the one in front.
 */

/** Resolves when the page is looked at, or `signal` is aborted. @param {AbortSignal} signal @returns {Promise<void>} */
export function seen(signal) {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden && !signal.aborted) return;
      document.removeEventListener('visibilitychange', look);
      signal.removeEventListener('abort', look);
      resolve();
    };
    document.addEventListener('visibilitychange', look);
    signal.addEventListener('abort', look);
    look();
  });
}

/** Its signal is aborted when nobody looks any more, or `signal` is. @param {AbortSignal} signal @returns {{ signal: AbortSignal, end: () => void }} */
export function whileSeen(signal) {
  const stop = new AbortController();
  const end = () => {
    document.removeEventListener('visibilitychange', look);
    signal.removeEventListener('abort', look);
    stop.abort();
  };
  const look = () => {
    if (document.hidden || signal.aborted) end();
  };
  document.addEventListener('visibilitychange', look);
  signal.addEventListener('abort', look);
  look();
  return { signal: stop.signal, end };
}
