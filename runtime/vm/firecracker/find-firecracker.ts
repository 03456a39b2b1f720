/**
 * Whether Firecracker can run here: its programs, its version, and KVM. /dev/kvm alone proves nothing: nested, some hosts give it and run nothing in it. So
 * dsec-agent runs a few instructions with it (runtime/agent/src/kvm.rs), once for each process.
 */
import { spawnSync } from 'node:child_process';
import { accessSync, constants } from 'node:fs';
import { delimiter, join } from 'node:path';
import { systemCode } from '#base';
import { findAgent } from '../../backend/agent-binary.ts';
import {
  type FirecrackerVersion,
  flawOf,
  parseFirecrackerVersion,
  RECOMMENDED_FIRECRACKER,
  versionText,
} from './version.ts';

export interface FirecrackerState {
  /** The first thing that is missing, for people; undefined: it can run. */
  readonly missing?: string;
  readonly binary?: string;
  readonly jailer?: string;
  readonly version?: FirecrackerVersion;
}

export interface FirecrackerPlaces {
  /** Else $DSEC_FIRECRACKER, else of PATH. */
  readonly binary?: string;
  /** Else $DSEC_JAILER, else of PATH. `none`: without, for whoever is not root. */
  readonly jailer?: string;
  /** Else /dev/kvm, which is tried too. */
  readonly kvm?: string;
}

const KVM = '/dev/kvm';
const VERSION_MS = 10_000;
/** Where nothing moves, it does not come back by itself. */
const PROBE_MS = 5_000;

export function firecrackerState(places: FirecrackerPlaces = {}): FirecrackerState {
  const binary = program(places.binary ?? process.env.DSEC_FIRECRACKER, 'firecracker');
  const wanted = places.jailer ?? process.env.DSEC_JAILER;
  const jailer = wanted === 'none' ? undefined : program(wanted, 'jailer');
  if (binary === undefined) {
    return { missing: `no firecracker in PATH or $DSEC_FIRECRACKER (take ${RECOMMENDED_FIRECRACKER})`, jailer };
  }
  const noKvm = kvmMissing(places.kvm ?? KVM);
  if (noKvm !== undefined) return { missing: noKvm, binary, jailer };
  const { stdout } = spawnSync(binary, ['--version'], { encoding: 'utf8', timeout: VERSION_MS, killSignal: 'SIGKILL' });
  const version = parseFirecrackerVersion(stdout ?? '');
  if (version === undefined) return { missing: `${binary} --version says no version`, binary, jailer };
  const flaw = flawOf(version);
  if (flaw !== undefined) {
    const missing = `${binary} is Firecracker ${versionText(version)}, which is refused: ${flaw}; take ${RECOMMENDED_FIRECRACKER}`;
    return { missing, binary, jailer, version };
  }
  if (jailer === undefined && wanted !== 'none' && process.getuid?.() === 0) {
    return { missing: 'no jailer in PATH or $DSEC_JAILER: root runs Firecracker only in its jail', binary, version };
  }
  // Last, for it may take a while where it fails.
  const missing = places.kvm === undefined ? kvmStandsStill() : undefined;
  return { ...(missing === undefined ? {} : { missing }), binary, jailer, version };
}

function program(given: string | undefined, name: string): string | undefined {
  const candidates =
    given === undefined || given === ''
      ? (process.env.PATH ?? '').split(delimiter).map((folder) => join(folder, name))
      : [given];
  return candidates.find((path) => {
    try {
      accessSync(path, constants.X_OK);
      return true;
    } catch {
      return false;
    }
  });
}

function kvmMissing(path: string): string | undefined {
  try {
    accessSync(path, constants.R_OK | constants.W_OK);
    return undefined;
  } catch (error) {
    return systemCode(error) === 'ENOENT' ? `no ${path}` : `${path} cannot be opened (${systemCode(error)})`;
  }
}

let stands: { readonly reason: string | undefined } | undefined;

/** $DSEC_VM_ACCELERATOR says it without trying. */
function kvmStandsStill(): string | undefined {
  const wish = process.env.DSEC_VM_ACCELERATOR;
  if (wish === 'kvm') return undefined;
  if (wish === 'tcg') return '$DSEC_VM_ACCELERATOR is tcg: KVM is not used';
  stands ??= { reason: triedKvm() };
  return stands.reason;
}

function triedKvm(): string | undefined {
  const agent = findAgent();
  if (agent === undefined) return 'dsec-agent, which tries KVM, is not built';
  const { status, stdout } = spawnSync(agent.path, ['kvm'], {
    encoding: 'utf8',
    timeout: PROBE_MS,
    killSignal: 'SIGKILL',
  });
  if (status === 0) return undefined;
  const said = stdout?.trim() || `nothing moved for ${PROBE_MS / 1000} s`;
  return `${KVM} is there, but runs no processor: ${said}`;
}
