/** Every error the runtime makes. Kept alphabetical; docs/errors.md lists the same rows. */
import { errorTable } from '#base';

export const runtimeErrors = {
  RUNTIME_AGENT_PROTOCOL: {
    message: 'dsec-agent does not speak as it should: {problem}',
    hint: 'build it again: node scripts/setup.mjs; until then use --runtime crun',
    exit: 125,
    http: 500,
  },
  RUNTIME_COMMAND_MISSING: {
    message: '{image}: no command: the image has neither Entrypoint nor Cmd, and none was given',
    hint: 'name one after --, for example: dsec run {image} -- /bin/sh',
    exit: 2,
    http: 400,
  },
  RUNTIME_COMMAND_NOT_EXECUTABLE: {
    message: '{command}: cannot be executed: {reason}',
    hint: 'look at it with: dsec stat IMAGE {path}',
    exit: 126,
    http: 400,
  },
  RUNTIME_COMMAND_NOT_FOUND: {
    message: '{command}: command not found: {reason}',
    hint: 'paths and PATH are those of the image, not of this machine; look with: dsec ls IMAGE',
    exit: 127,
    http: 404,
  },
  RUNTIME_ENV: {
    message: 'environment entry {entry}: {problem}',
    hint: 'write NAME=VALUE, or NAME alone to pass on the value it has here',
    exit: 2,
    http: 400,
  },
  RUNTIME_LAUNCHER_GONE: {
    message: 'the launcher of the sandbox has gone: {reason}; what became of the command is not known',
    hint: 'run it again; what is left of this one is removed by the next command',
    exit: 125,
    http: 500,
  },
  RUNTIME_LAYER_LIMIT: {
    message: 'the composition has {layers} layers; OverlayFS takes {limit}',
    hint: 'convert the images with a larger --collapse-limit, so that they have fewer layers',
    exit: 3,
    http: 400,
  },
  RUNTIME_NEEDS_ROOT: {
    message: 'running a sandbox needs root: it mounts file systems and makes namespaces',
    hint: 'run the command with sudo',
    exit: 5,
    http: 403,
  },
  RUNTIME_NO_LAUNCHER: {
    message: 'dsec-agent, the launcher of sandboxes, is not built',
    hint: 'node scripts/setup.mjs builds it where there is a Rust compiler (apt-get install rustc); or use --runtime crun',
    exit: 5,
    http: 501,
  },
  RUNTIME_NO_OCI_RUNTIME: {
    message: 'neither crun nor runc is installed',
    hint: 'apt-get install crun',
    exit: 5,
    http: 501,
  },
  RUNTIME_NO_TERMINAL: {
    message: 'a terminal was asked for, but standard input is none',
    hint: 'leave -t out, or run it from a terminal',
    exit: 2,
    http: 400,
  },
  RUNTIME_PATH: {
    message: '{path}: {problem}',
    hint: 'the path is resolved inside the image; look with: dsec ls IMAGE',
    exit: 3,
    http: 400,
  },
  RUNTIME_RECORD_WRITE: {
    message: '{path}: the record of a sandbox cannot be written: {reason}',
    hint: 'free some space in the state folder {folder}, or name another one with $DSEC_STATE; `dsec sandbox rm` works on a full disk too',
    exit: 1,
    http: 507,
  },
  RUNTIME_SANDBOX_BUSY: {
    message: 'sandbox {name} is in use by another command',
    hint: '{remedy}',
    retryable: true,
    exit: 1,
    http: 409,
  },
  RUNTIME_SANDBOX_EXISTS: {
    message: 'sandbox {name} exists already: it was kept',
    hint: 'remove it with `dsec sandbox rm {name}`, run with --replace, or choose another --name',
    exit: 1,
    http: 409,
  },
  RUNTIME_SANDBOX_NAME: {
    message: 'sandbox name "{name}": {problem}',
    hint: 'use 1 to 63 lowercase letters, digits, "-", "_" and ".", beginning with a letter or digit',
    exit: 2,
    http: 400,
  },
  RUNTIME_SANDBOX_NOT_FOUND: {
    message: 'no sandbox named {name}',
    hint: 'list them with `dsec sandbox ls`; one that has ended is there only if it was run with --keep',
    exit: 4,
    http: 404,
  },
  RUNTIME_SANDBOX_RECORD: {
    message: '{path}: the record of this sandbox is damaged: {problem}',
    hint: 'nothing can be told from it; remove the folder that holds it when nothing is mounted below',
    exit: 1,
    http: 500,
  },
  RUNTIME_SANDBOX_RUNNING: {
    message: 'sandbox {name} is running',
    hint: '{remedy}',
    retryable: true,
    exit: 1,
    http: 409,
  },
  RUNTIME_SANDBOX_STUCK: {
    message: 'sandbox {name} got SIGKILL and has not ended',
    hint: 'a process of it may be in an endless kernel wait; `dsec sandbox ls` says when it is gone',
    retryable: true,
    exit: 1,
    http: 504,
  },
  RUNTIME_START_FAILED: {
    message: '{runtime} could not start the sandbox: {reason}',
    hint: '`dsec doctor` says what this machine lacks',
    exit: 125,
    http: 500,
  },
  RUNTIME_TRACE_INTERRUPTED: {
    message: 'the start of {image} was not recorded as a whole: the data server died meanwhile',
    hint: 'run the same command again; nothing was kept',
    retryable: true,
    exit: 1,
    http: 500,
  },
  RUNTIME_USER: {
    message: 'user {user}: {problem}',
    hint: 'users and groups are looked up in /etc/passwd and /etc/group of the image; numbers need no entry there',
    exit: 2,
    http: 400,
  },
} as const;

export const fail = errorTable(runtimeErrors);
