/**
 * What is done about a full machine that has the memory of another: its system believes to have the other's address, and that it is then. Its cable is pulled
 * and put in again, upon which many systems ask for an address; where a guest agent answers, the clock is set, and whoever asks for addresses is told to.
 */
import type { RunningVm } from '../vm-driver.ts';
import type { GuestAgent } from './guest-agent.ts';

/** Of its only one (qemu/arguments.ts). */
const CARD = 'nic';
/** Until a system has seen that there is no cable. */
export const CABLE_PULLED_MS = 2_000;
const NS_PER_MS = 1_000_000;

/**
 * Whoever has the addresses of a Linux system, told to ask anew. By what runs: programs of several may be installed. Signals: udhcpc's to let its address go,
 * and to ask for one.
 */
const ASK_ANEW = `
links=$(ls /sys/class/net | grep -v '^lo$')
for one in /proc/[0-9]*; do
  read name < $one/comm || continue
  case $name in
    systemd-network) for link in $links; do networkctl reconfigure $link; done ;;
    NetworkManager) nmcli networking off; nmcli networking on ;;
    dhcpcd) dhcpcd -n; break ;;
    dhclient) dhclient -r; dhclient; break ;;
    udhcpc) kill -USR2 \${one#/proc/}; sleep 1; kill -USR1 \${one#/proc/} ;;
  esac
done
`;

/** Before its processors run. */
export async function pullCable(vm: RunningVm): Promise<void> {
  await vm.qmp!.execute('set_link', { name: CARD, up: false });
}

/** One that is in is no error. */
export async function putCableIn(vm: RunningVm): Promise<void> {
  await vm.qmp!.execute('set_link', { name: CARD, up: true });
}

/** The time is now: what its agent is asked. */
export function guestTime(): [command: string, args: object] {
  return ['guest-set-time', { time: Date.now() * NS_PER_MS }];
}

export async function askForAddress(agent: GuestAgent): Promise<void> {
  const { id } = ((await agent.ask('guest-get-osinfo').catch(() => undefined)) ?? {}) as { id?: unknown };
  const program = id === 'mswindows' ? ['ipconfig', '/renew'] : ['sh', '-c', ASK_ANEW];
  await agent.ask('guest-exec', { path: program[0], arg: program.slice(1) });
}
