/** Whether sandboxes can be virtual machines here. */
import { messageOf } from '#base';
import type { Feature } from '#linux';
import { microvmSupport, runtimeFolders } from '#runtime';

const USED_FOR = 'dsec sandbox create --backend microvm';
const FALLBACK = 'containers';

export function machineRows(): Feature[] {
  try {
    const { problem, hint, driver, why, accelerator, kernel, tap } = microvmSupport(runtimeFolders().stateDir);
    if (problem !== undefined) {
      return [
        { name: 'microvm', present: false, detail: `${problem}: ${hint}`, usedFor: USED_FOR, fallback: FALLBACK },
      ];
    }
    const speed = accelerator === 'kvm' ? 'KVM' : 'emulated (no KVM): some ten times slower';
    return [
      {
        name: 'microvm',
        present: true,
        detail: `${driver}, ${speed}, Linux ${kernel} (${why})`,
        usedFor: USED_FOR,
        fallback: FALLBACK,
      },
      {
        name: '/dev/net/tun',
        present: tap === true,
        detail: tap === true ? 'there' : 'modprobe tun',
        usedFor: 'network policies of virtual machines',
        fallback: 'they have loopback alone',
      },
    ];
  } catch (error) {
    return [{ name: 'microvm', present: false, detail: messageOf(error), usedFor: USED_FOR, fallback: FALLBACK }];
  }
}
