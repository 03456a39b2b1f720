// `node --import` of this: every module and every compiled addon that the process loads, a line each, into $LOADED_MODULES.
import { appendFileSync, readFileSync } from 'node:fs';
import { createRequire, register } from 'node:module';

register(new URL('./hook.mjs', import.meta.url));
const { cache } = createRequire(import.meta.url);
process.on('exit', () => {
  const addons = readFileSync('/proc/self/maps', 'utf8').match(/\/\S+\.node$/gm) ?? [];
  const lines = [...Object.keys(cache), ...new Set(addons)].map((path) => `${path}\n`);
  appendFileSync(String(process.env.LOADED_MODULES), lines.join(''));
});
