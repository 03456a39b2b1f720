export { type AgentBinary, type AgentState, agentState, findAgent } from './backend/agent-binary.ts';
export { appArmor } from './backend/apparmor.ts';
export type {
  Backend,
  BackendCapabilities,
  Exit,
  LaunchSpec,
  PreparationSpec,
  ProcessSpec,
  RunningSandbox,
} from './backend/backend.ts';
export { backendNamed, chooseBackend, RUNTIME_NAMES, type RuntimeName } from './backend/choose-backend.ts';
export type { DeviceNode } from './backend/device-rules.ts';
export { cgroupsAreHybrid, findOciRuntime, type OciRuntimeChoice, openOciBackend } from './backend/oci-runtime.ts';
export { OWN_BACKEND, openOwnBackend } from './backend/own-backend.ts';
export { limitSupport } from './backend/sandbox-cgroups.ts';
export { USERNS_MODES, type UsernsMode, usernsSupport } from './backend/user-namespace.ts';
export { type Composition, composeLayers, LAYER_LIMIT } from './compose/compose-layers.ts';
export { type DiskFacts, diskWay } from './disk/sandbox-disk.ts';
export { runtimeErrors } from './errors.ts';
export { FnCallNode, type FnCallOptions, type PoolView } from './fncall/fncall-node.ts';
export { cardMinor, type GpuPlaces, gpuDevices } from './fncall/gpu/gpu-devices.ts';
export { type GpuLease, type GpuMode, GpuScheduler } from './fncall/gpu/gpu-scheduler.ts';
export { type GpuSource, MACHINE_GPUS } from './fncall/gpu/node-gpus.ts';
export { type Gpu, listGpus } from './fncall/gpu/nvidia-smi.ts';
export { isUnknownLanguage, LANGUAGES, type Language, type LanguageTable } from './fncall/languages.ts';
export type { Pool } from './fncall/pool.ts';
export type { PoolEnvironment, PoolOptions } from './fncall/pool-spec.ts';
export {
  type FnCallTask,
  type StepResult,
  TASK_STATUSES,
  type TaskFile,
  type TaskLimits,
  type TaskResult,
  type TaskStatus,
  textOf,
} from './fncall/task.ts';
export type { DeniedAttempt } from './network/denied-log.ts';
export { droppingChains } from './network/host-filter.ts';
export { NETWORK_MODES, type NetworkMode, type NetworkOptions } from './network/network-facts.ts';
export type { NetworkCounters } from './network/node-network.ts';
export { type NetworkPolicy, parsePolicy, type WrittenRule } from './network/policy.ts';
export { BUILT_IN_SERVICES } from './network/service-table.ts';
export type { CreateOptions } from './node/create-sandbox.ts';
export type { NodeSandbox, StandsStill } from './node/node-sandbox.ts';
export type { NetworkView } from './node/resident-network.ts';
export { type NodeOptions, SandboxNode } from './node/sandbox-node.ts';
export { commandOf } from './sandbox/command-lookup.ts';
export {
  type Caller,
  type PipedStdio,
  type RunOptions,
  type RunResult,
  runContainer,
} from './sandbox/run-container.ts';
export {
  type ImageReference,
  type ResidentFacts,
  randomSandboxName,
  type SandboxRecord,
  type SandboxTag,
} from './sandbox/sandbox-record.ts';
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
export {
  BACKEND_TABLE,
  BACKENDS,
  type Backend as BackendKind,
  type CapabilityRow,
  featuresOf,
  type Support,
} from './sandbox-api/backend-table.ts';
export { MACHINE_SIZES, SANDBOX_BACKENDS, type SandboxBackend } from './sandbox-api/backends.ts';
export { type Capability, isUnsupported, needs, unsupported } from './sandbox-api/capabilities.ts';
export type { ExecHandle, ExecResult, ExecSpec, OutputFrom, OutputPart } from './sandbox-api/exec.ts';
export type { FileEntry, FileStatus, SandboxFiles, UploadSpec, UploadState } from './sandbox-api/files.ts';
export type { AllLimits, LimitChanges } from './sandbox-api/limits.ts';
export { MEMORY_OPTIONS, type MemoryOptions } from './sandbox-api/memory-options.ts';
export {
  type EndReason,
  IDLE_ACTIONS,
  type IdleAction,
  type PauseReport,
  type Sandbox,
  type SandboxEnd,
  SERVICE_CLASSES,
  type ServiceClass,
} from './sandbox-api/sandbox.ts';
export type { ShellOptions, ShellResult, ShellSession } from './sandbox-api/shell.ts';
export type { DiskUsage, SandboxUsage } from './sandbox-api/usage.ts';
export {
  FILE_EVENTS,
  type FileEvent,
  type FileEventName,
  type FileWatch,
  type WatchOptions,
} from './sandbox-api/watch.ts';
export type { Greeting } from './service/greeting.ts';
export { type ResidentLauncher, type ServiceClient, startResidentLauncher } from './service/resident-launcher.ts';
export { reclaimTraces } from './trace/trace-node.ts';
export { type TracedRun, type TraceRunOptions, traceRun } from './trace/trace-run.ts';
export { type FirecrackerState, firecrackerState } from './vm/firecracker/find-firecracker.ts';
export { openFirecrackerDriver } from './vm/firecracker/firecracker-driver.ts';
export {
  CLIPBOARD_TYPES,
  type ClipboardType,
  MOST_CLIPBOARD_BYTES,
  SELECTIONS,
  type Selection,
} from './vm/full/clipboard-file.ts';
export { FULL_VM, FullVmSandbox } from './vm/full/full-vm-sandbox.ts';
export { FIRMWARES, type Firmware, type MachineWish, SCREEN, VNC_PORT } from './vm/full/machine-facts.ts';
export { BUTTONS, type ScreenAction } from './vm/full/screen.ts';
export { fetchGuestKernel, type GuestKernel, KERNEL_SERIES } from './vm/guest/guest-kernel.ts';
export { type GuestMemory, type GuestWrite, memoryGuestWrites, memoryKernelArguments } from './vm/guest-memory.ts';
export { openQemuDriver } from './vm/qemu/qemu-driver.ts';
export type { RunningVm, VmDrive, VmDriver, VmSpec } from './vm/vm-driver.ts';
export { useVmDriver, VM_DRIVER_WISHES, type VmDriverWish } from './vm/vm-drivers.ts';
export { fullVmProblem, type MicrovmSupport, microvmSupport } from './vm/vm-support.ts';
export { prepareTemplate, templateStates } from './vm/warm-pool/prepare-template.ts';
export { removeTemplate, type Template } from './vm/warm-pool/template-folder.ts';
