/** Every error the image service makes. Kept alphabetical; docs/errors.md lists the same rows. */
import { errorTable } from '#base';

export const imagesvcErrors = {} as const;

export const fail = errorTable(imagesvcErrors);
