/** What this machine's ublk driver can do for us, asked without changing anything. */
import { messageOf } from '#base';
import { UblkControl } from './control.ts';
import { UBLK_FEATURES } from './features.ts';

export interface UblkSupport {
  /** Why no device can be made here; undefined where one can. */
  readonly obstacle: string | undefined;
  /** Names of UBLK_FEATURES; empty where the driver cannot be asked. */
  readonly features: readonly string[];
}

export async function ublkSupport(): Promise<UblkSupport> {
  let control: UblkControl;
  try {
    control = new UblkControl();
  } catch (error) {
    return { obstacle: messageOf(error), features: [] };
  }
  try {
    const features = await control.features();
    if (features === undefined) return { obstacle: 'its driver is older than Linux 6.5', features: [] };
    const missing = UBLK_FEATURES.filter(({ name, use }) => use === 'needed' && !features.includes(name));
    const obstacle =
      missing.length === 0 ? undefined : `its driver lacks ${missing.map(({ name }) => name).join(', ')}`;
    return { obstacle, features };
  } finally {
    await control.close();
  }
}
