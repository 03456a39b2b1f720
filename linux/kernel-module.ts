/** Whether the running kernel has a module: loaded, built in, or on the disk for modprobe. Nothing is loaded by looking. */
import { existsSync, readFileSync } from 'node:fs';
import { release } from 'node:os';
import { basename, join } from 'node:path';

export type ModuleState = 'loaded' | 'built in' | 'not loaded' | 'missing';

/** @param folder of the modules, for tests */
export function moduleState(name: string, folder = join('/lib/modules', release())): ModuleState {
  if (existsSync(join('/sys/module', name))) return 'loaded';
  if (lists(join(folder, 'modules.builtin'), name)) return 'built in';
  return lists(join(folder, 'modules.dep'), name) ? 'not loaded' : 'missing';
}

/** Lines begin with the path of a module: `kernel/drivers/block/ublk_drv.ko.xz:`. Dashes and underscores are the same. */
function lists(file: string, name: string): boolean {
  let text: string;
  try {
    text = readFileSync(file, 'latin1');
  } catch {
    return false;
  }
  return text.split('\n').some((line) => {
    const module = basename(line.split(':', 1)[0]!).replace(/\.ko(\.\w+)?$/, '');
    return module.replaceAll('-', '_') === name;
  });
}
