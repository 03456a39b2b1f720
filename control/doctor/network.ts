/** Whether sandboxes can have a network with a policy here (docs/network.md). Nothing is changed, nothing is tried that would be. */
import { existsSync } from 'node:fs';
import { messageOf } from '#base';
import { atLeast, type Feature, readMountInfo } from '#linux';
import { droppingChains } from '#runtime';

const WITHOUT = 'dsec sandbox create --network none or host';

export function networkRows(): Feature[] {
  return [linkRow(), filterRow(), forwardRow(), programRow()];
}

function linkRow(): Feature {
  const present = atLeast(5, 14) && existsSync('/sys/fs/bpf');
  return {
    name: 'eBPF at links',
    present,
    detail: present ? 'the kernel has it' : 'it needs Linux 5.14 or newer with eBPF',
    usedFor: 'sandbox create --network policy: rules on what a sandbox reaches',
    fallback: WITHOUT,
  };
}

function filterRow(): Feature {
  const found = chains();
  return {
    name: 'nftables',
    present: !(found instanceof Error),
    detail: found instanceof Error ? messageOf(found) : 'nft answers',
    usedFor: 'sandbox create --network policy: the way out, under an address of this machine',
    fallback: `${WITHOUT}; apt-get install nftables`,
  };
}

function forwardRow(): Feature {
  const found = chains();
  const dropping = found instanceof Error ? [] : found;
  return {
    name: 'forwarding',
    present: dropping.length === 0,
    detail: dropping.length === 0 ? 'no chain of others drops it' : `dropped by ${dropping.join(', ')}`,
    usedFor: 'packets of sandboxes with a network of their own',
    fallback: 'they reach nothing until that chain lets dsv* through: docs/network.md',
  };
}

function programRow(): Feature {
  const present = atLeast(6, 1) && readMountInfo().some(({ type }) => type === 'cgroup2');
  return {
    name: 'programs of denied attempts',
    present,
    detail: present ? 'hooks of cgroup v2' : 'it needs Linux 6.1 or newer and a cgroup v2 tree',
    usedFor: 'sandbox network NAME denied: which program it was',
    fallback: 'attempts are logged without it',
  };
}

function chains(): string[] | Error {
  try {
    return droppingChains();
  } catch (error) {
    return error as Error;
  }
}
