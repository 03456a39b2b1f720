/**
 * Whether Firecracker can run here: its programs, its version, and KVM. /dev/kvm alone proves nothing: nested, some hosts give it and run nothing in it. So
 * where QEMU is installed one instruction is run with it.
 */
import { spawnSync } from 'node:child_process';
import { accessSync, constants } from 'node:fs';
import { delimiter, join } from 'node:path';
import { systemCode } from '#base';
import { accelerator, findQemu } from '../qemu/accelerator.ts';
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

export function firecrackerState(places: FirecrackerPlaces = {}): FirecrackerState {
  const binary = program(places.binary ?? process.env.DSEC_FIRECRACKER, 'firecracker');
  const wanted = places.jailer ?? process.env.DSEC_JAILER;
  const jailer = wanted === 'none' ? undefined : program(wanted, 'jailer');
  const noKvm = kvmMissing(places.kvm ?? KVM);
  if (noKvm !== undefined) return { missing: noKvm, binary, jailer };
  if (binary === undefined) {
    return { missing: `no firecracker in PATH or $DSEC_FIRECRACKER (take ${RECOMMENDED_FIRECRACKER})`, jailer };
  }
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
  // Last, for it takes seconds where it fails.
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

function kvmStandsStill(): string | undefined {
  const qemu = findQemu();
  if (qemu === undefined || accelerator(qemu) === 'kvm') return undefined;
  return `${KVM} is there, but what is started with it does not run (tried)`;
}
