/** Who is logged in. The token stays in this tab (sessionStorage) and travels in a header, never in an address. */
import { ApiClient } from '../api/client.js';

const KEY = 'dsec.token';

/** Where `/v1` is: beside the console, whatever stands before both. */
const base = new URL('../', document.baseURI);

/** @typedef {{ api: ApiClient, who: Identity }} Session */
/** @typedef {{ principal?: string, kind?: string, project?: string, actions?: string[] }} Identity */

/** @param {string} token @param {() => void} refused @returns {Promise<Session>} @throws ApiError */
export async function openSession(token, refused) {
  let opened = false;
  const api = new ApiClient(token, { base, refused: () => opened && refused() });
  const answer = await api.json('/v1/whoami');
  const who = answer.identity ?? answer;
  opened = true;
  sessionStorage.setItem(KEY, token);
  return { api, who };
}

export function keptToken() {
  return sessionStorage.getItem(KEY) ?? undefined;
}

export function forgetToken() {
  sessionStorage.removeItem(KEY);
}
