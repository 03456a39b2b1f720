/** Long lists, page by page: what follows is asked for until it is all here, or more than a page can show. No DOM here. */
import { query } from './client.js';

const PAGE = 5000;
const MOST = 100_000;

/**
 * @param {{ json(path: string, options?: object): Promise<any> }} api
 * @param {Record<string, string | undefined>} filter
 * @param {AbortSignal} signal
 * @returns {Promise<{ sandboxes: any[], unreachable: string[], truncated: boolean }>} `truncated`: there are more
 */
export async function pagesOf(api, filter, signal) {
  /** @type {any[]} */
  const sandboxes = [];
  const unreachable = new Set();
  /** @type {string | undefined} */
  let from;
  do {
    const asked = query({ ...filter, limit: String(PAGE), continue: from });
    const page = await api.json(`/v1/sandboxes${asked}`, { signal });
    for (const one of page.sandboxes) sandboxes.push(one);
    for (const edge of page.unreachable ?? []) unreachable.add(edge);
    from = page.continue;
  } while (from !== undefined && sandboxes.length < MOST);
  return { sandboxes, unreachable: [...unreachable], truncated: from !== undefined };
}
