import { appendFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

/** @type {import('node:module').LoadHook} */
export function load(url, context, next) {
  if (url.startsWith('file:')) appendFileSync(String(process.env.LOADED_MODULES), `${fileURLToPath(url)}\n`);
  return next(url, context);
}
