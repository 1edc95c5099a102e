//! What a [journal](crate::journal) keeps of the requests of a session.

use std::os::fd::AsFd;

use vhost::vhost_user::message::{FrontendReq, VhostUserMemory, VhostUserMemoryRegion};
use vm_memory::ByteValued;

use super::requests::{NO_FD, Rule};
use super::state::{Session, Slot};
use crate::journal::{self, Change, Key};

/// The key of a request with this payload.
pub(crate) fn key(request: u32, payload: &[u8]) -> Key {
    use FrontendReq as Req;
    let index = match Req::try_from(request) {
        Ok(
            Req::SET_VRING_NUM
            | Req::SET_VRING_ADDR
            | Req::SET_VRING_BASE
            | Req::SET_VRING_ENABLE
            | Req::GET_VRING_BASE
            | Req::SET_CONFIG,
        ) => payload.first_chunk().map(|word| u32::from_ne_bytes(*word)),
        Ok(Req::SET_VRING_KICK | Req::SET_VRING_CALL | Req::SET_VRING_ERR) => {
            let word = payload.first_chunk().map(|word| u64::from_ne_bytes(*word));
            word.and_then(|word| u32::try_from(word & !NO_FD).ok())
        }
        _ => None,
    };
    // The session refuses a payload that is too short, or with an index that does not exist.
    let index = index.unwrap_or_default();
    Key { request, index }
}

/// Whether a request with this payload comes with descriptors.
pub(crate) fn has_fds(request: u32, payload: &[u8]) -> bool {
    use FrontendReq as Req;
    match Req::try_from(request) {
        Ok(Req::SET_VRING_KICK | Req::SET_VRING_CALL | Req::SET_VRING_ERR) => payload
            .first_chunk()
            .is_some_and(|word| u64::from_ne_bytes(*word) & NO_FD == 0),
        _ => Rule::of(request).is_some_and(Rule::takes_fds),
    }
}

impl Session {
    /// What else changes in the journal after the request with this key and number was carried out.
    pub(crate) fn changes(&self, key: Key, number: u64) -> Vec<Change<'_>> {
        use FrontendReq as Req;
        let all = |request: Req| Change::DropAll(request as u32);
        match Req::try_from(key.request) {
            Ok(Req::ADD_MEM_REG | Req::REM_MEM_REG) => match self.slots.is_empty() {
                true => vec![all(Req::SET_MEM_TABLE)],
                false => vec![self.memory_table(number)],
            },
            Ok(Req::SET_FEATURES) if self.config == self.initial_config() => {
                vec![all(Req::SET_CONFIG)]
            }
            Ok(Req::GET_VRING_BASE) => {
                let queue = usize::try_from(key.index).ok();
                let queue = queue.and_then(|index| self.queues.get(index));
                let base = queue.map_or(0, |queue| queue.base);
                let payload = [key.index, base.into()].map(u32::to_ne_bytes);
                let (kick, request) = (Req::SET_VRING_KICK as u32, Req::SET_VRING_BASE as u32);
                vec![
                    Change::Drop(Key {
                        request: kick,
                        ..key
                    }),
                    Change::Keep {
                        key: Key { request, ..key },
                        bytes: journal::encode_derived(
                            number,
                            request,
                            payload.as_flattened().to_vec(),
                        ),
                        fds: Vec::new(),
                    },
                ]
            }
            Ok(Req::RESET_DEVICE) => [
                Req::SET_VRING_NUM,
                Req::SET_VRING_ADDR,
                Req::SET_VRING_BASE,
                Req::SET_VRING_ENABLE,
                Req::SET_VRING_KICK,
                Req::SET_CONFIG,
                Req::SET_STATUS,
            ]
            .map(all)
            .into(),
            _ => Vec::new(),
        }
    }

    /// The regions that were added one by one, as a table.
    fn memory_table(&self, number: u64) -> Change<'_> {
        let mut payload = VhostUserMemory {
            num_regions: self.slots.len() as u32,
            ..VhostUserMemory::default()
        }
        .as_slice()
        .to_vec();
        for Slot { region, .. } in &self.slots {
            let region = VhostUserMemoryRegion {
                guest_phys_addr: region.guest_addr,
                memory_size: region.len,
                user_addr: region.user_addr,
                mmap_offset: region.fd_offset,
            };
            payload.extend_from_slice(region.as_slice());
        }
        let request = FrontendReq::SET_MEM_TABLE as u32;
        let key = Key { request, index: 0 };
        Change::Keep {
            key,
            bytes: journal::encode_derived(number, request, payload),
            fds: self.slots.iter().map(|slot| slot.file.as_fd()).collect(),
        }
    }
}
