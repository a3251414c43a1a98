//! Slots of a few tokens grouped by expert: a counting sort by one block.

use crate::args::GroupRowsArgs;
use crate::ptx::global;
use cuda_std::prelude::*;

/// # Safety
/// Launched with one block of 1024 threads and buffers as [`GroupRowsArgs`] says.
#[kernel(threads = 1024)]
pub(crate) unsafe fn group_rows(args: GroupRowsArgs) {
    let slot = thread::thread_idx_x();
    if slot >= args.slots {
        return;
    }
    // SAFETY: slots and rows are below `args.slots`, which every list has room for; each row
    // belongs to one slot.
    unsafe {
        let expert_of = |slot: u32| global::load_read_only(args.ids + slot as u64 * 4);
        let mine = expert_of(slot);
        // As unsigned numbers -1 and other negative ids lie past every expert.
        let valid = mine < args.experts;
        if !valid && mine != u32::MAX {
            global::store(args.status, 1);
        }
        let (mut before, mut alike, mut first) = (0, 0, true);
        let mut other = 0;
        while other < args.slots {
            let expert = expert_of(other);
            let earlier = other < slot;
            if expert < args.experts {
                if !valid || expert < mine || expert == mine && earlier {
                    before += 1;
                }
                if expert == mine {
                    alike += 1;
                    first &= !earlier;
                }
            } else if !valid && earlier {
                before += 1;
            }
            other += 1;
        }
        let row = before;
        let at = slot as u64 * 4;
        let token = if valid { slot / args.top_k } else { u32::MAX };
        global::store(args.source + row as u64 * 4, token);
        global::store(args.output_index + at, if valid { row } else { u32::MAX });
        let end = if valid && first { row + alike } else { row };
        let weight = if valid { mine } else { 0 };
        global::store_v4_if(true, args.groups + row as u64 * 16, [row, end, weight, 0]);
    }
}
