export type { Backend, BackendCapabilities, Exit, LaunchSpec, ProcessSpec, RunningSandbox } from './backend/backend.ts';
export { cgroupsAreHybrid, findOciRuntime, type OciRuntimeChoice, openOciBackend } from './backend/oci-runtime.ts';
export { type Composition, composeLayers, LAYER_LIMIT } from './compose/compose-layers.ts';
export { runtimeErrors } from './errors.ts';
export { type PipedStdio, type RunOptions, type RunResult, runContainer } from './sandbox/run-container.ts';
export type { ImageReference, SandboxRecord } from './sandbox/sandbox-record.ts';
export {
  type KeptSandbox,
  listSandboxes,
  reclaimSandboxes,
  removeSandbox,
  type SandboxReclaim,
  withKeptSandbox,
} from './sandbox/sandboxes.ts';
export { type RuntimeFolders, runtimeFolders } from './sandbox/state-folders.ts';
export {
  forceRemoveSandbox,
  STOP_TIME_MS,
  type StopOptions,
  type StopResult,
  stopSandbox,
} from './sandbox/stop-sandbox.ts';
