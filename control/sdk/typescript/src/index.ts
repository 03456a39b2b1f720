/** libdsec: sandboxes of a DSec cluster. docs/sdk.md begins with an example. */
export { type BatchItem, type ClientOptions, DSecClient, type ListOptions, type SandboxList } from './client.ts';
export { type CollectOptions, Command, type CommandView, type OutputOptions } from './command.ts';
export { CommandResult, type ExecResult } from './command-result.ts';
export type { EndpointOptions } from './context.ts';
export {
  AuthenticationError,
  CommandFailed,
  CommandNotStarted,
  ConfigurationError,
  Conflict,
  ConnectionLost,
  DSecError,
  DSecTimeoutError,
  ERROR_TABLE,
  FileChanged,
  FileError,
  InvalidRequest,
  NoCapacity,
  NotFound,
  PermissionDenied,
  ProtocolError,
  QuotaExceeded,
  RateLimited,
  SandboxGone,
  ServerError,
  ShellLost,
  Unavailable,
  UnsupportedError,
} from './errors.ts';
export type { TreeOptions } from './file-trees.ts';
export type { FileEntry, FileEvent, FileStatus, SandboxFiles } from './files.ts';
export {
  type DSecFnCallRunArgs,
  FnCall,
  type FnCallLimits,
  type FnCallResult,
  type FnCallStatus,
  type FnCallStep,
  type FnCallTask,
} from './fncall.ts';
export type { OutputPart, StreamName } from './output-frames.ts';
export type {
  DSecContainerRunArgs,
  DSecMicroVMRunArgs,
  DSecRunArgs,
  DSecVMRunArgs,
  NetworkPolicy,
  NetworkRules,
  SandboxLimits,
} from './run-args.ts';
export { type ExecOptions, type RunOptions, Sandbox, type StopOptions } from './sandbox.ts';
export type {
  LimitChanges,
  NetworkView,
  PackedImage,
  PauseReport,
  SandboxEnd,
  SandboxUsage,
  SandboxView,
} from './sandbox-views.ts';
export type {
  ClipboardOptions,
  ClipboardSelection,
  MouseButton,
  SandboxClipboard,
  SandboxScreen,
  ScreenAction,
} from './screen.ts';
export { type Expected, type ShellOptions, ShellResult, ShellSession } from './shell.ts';
export type { CallOptions, Query } from './transport.ts';
