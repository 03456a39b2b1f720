/**
 * A serving process whose supervisor has died serves on, but nobody would ever end it, nor start another in its place. So it gets a
 * supervisor by itself, unless a command gave it one before: that takes the mount over and ends this process.
 */
import { messageOf } from '#base';
import type { ServerConfig } from './server-messages.ts';

/** @param log For people. */
export function adoptWhenOrphaned(config: ServerConfig, log: (text: string) => void): void {
  process.once('disconnect', () => {
    const adopt = async () => {
      try {
        // Loaded now: who starts supervisors knows of mounts and much else.
        const { adoptOrphan } = await import('./data-server.ts');
        await adoptOrphan(config);
      } catch (error) {
        log(`no new supervisor: ${messageOf(error)}`);
      }
      setTimeout(adopt, config.orphanMs).unref();
    };
    setTimeout(adopt, config.orphanMs).unref();
  });
}
