/** Templates as an operator sees them: made before anybody asks, listed, taken away. */
import { fail } from '../../errors.ts';
import { refuseWithoutRoot } from '../../node/create-sandbox.ts';
import type { RuntimeFolders } from '../../sandbox/state-folders.ts';
import { ALL_PARTS } from '../guest/guest-archive.ts';
import { machineBoot } from '../machine-boot.ts';
import { vmFacts } from '../machine-facts.ts';
import { type SandboxVmDriver, sandboxVmDriver } from '../vm-drivers.ts';
import { AGENT_PORT } from '../vm-places.ts';
import { makeTemplate } from './make-template.ts';
import { listTemplates, type Template } from './template-folder.ts';
import { lateSpec, shapeOf } from './template-shape.ts';

export interface TemplateWish {
  /** Those of a sandbox, with its defaults. */
  readonly cpus?: number;
  readonly memoryBytes?: number;
  readonly reporting?: boolean;
}

/** One that is there is taken. @param agent Path of dsec-agent. @throws RUNTIME_NEEDS_ROOT, RUNTIME_GUEST_KERNEL, RUNTIME_LIMIT, VM_* */
export async function prepareTemplate(
  wish: TemplateWish,
  { stateDir, runDir }: RuntimeFolders,
  agent: string,
  signal?: AbortSignal,
): Promise<Template> {
  refuseWithoutRoot();
  const driver = sandboxVmDriver();
  if (!driver.features.lateDevices)
    throw fail('VM_UNSUPPORTED', { driver: driver.name, what: 'templates of machines' });
  const { spec, modules } = machineFor(wish, stateDir, agent, driver);
  return makeTemplate({ stateDir, runDir, driver, spec, modules, shape: shapeOf(spec, driver), signal });
}

/** `isUseful`: machines are made of it now; else kernel, agent, QEMU or processor have changed since. Nothing is known where there are no machines. @throws RUNTIME_NEEDS_ROOT */
export function templateStates(
  { stateDir }: RuntimeFolders,
  agent: string | undefined,
): (Template & { readonly isUseful?: boolean })[] {
  refuseWithoutRoot();
  const templates = listTemplates(stateDir);
  if (templates.length === 0 || agent === undefined) return templates;
  let world: string;
  try {
    const driver = sandboxVmDriver();
    world = shapeOf(machineFor({}, stateDir, agent, driver).spec, driver).world;
  } catch {
    return templates;
  }
  return templates.map((one) => ({ ...one, isUseful: one.world === world }));
}

function machineFor(
  { cpus, memoryBytes, reporting }: TemplateWish,
  stateDir: string,
  agent: string,
  driver: SandboxVmDriver,
) {
  const facts = vmFacts(driver, { cpus, memoryBytes }, { memory: { reporting }, lazy: false });
  const { archive, spec } = machineBoot(stateDir, agent, driver, facts);
  // Places are those of whoever makes it.
  const own = { id: 'template', folder: '/', memoryFile: '/', drives: [], ports: [{ name: AGENT_PORT, socket: '/' }] };
  return { spec: lateSpec({ ...own, ...spec }), modules: archive.modulesFor(ALL_PARTS) };
}
