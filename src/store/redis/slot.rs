//! Where a Redis Cluster puts a key: enough of it to tell the keys of one shard from those of another.

/// Slots in one range. There are 64 ranges, one bit each: a shard's slots lie together, by and large.
const SLOTS_OF_A_RANGE: u16 = 16_384 / 64;

/// The bit of the range that a key's slot is in. The key has no hash tag: no prefix may have one.
#[must_use]
pub fn range_of(key: &[u8]) -> u64 {
    1_u64.wrapping_shl(u32::from(slot_of(key) / SLOTS_OF_A_RANGE))
}

fn slot_of(key: &[u8]) -> u16 {
    key.iter().fold(0, |crc, byte| crc16(crc, *byte)) % 16_384
}

/// CRC-16/XMODEM, bit by bit: a table would take more room than it saves time.
const fn crc16(crc: u16, byte: u8) -> u16 {
    let mut crc = crc ^ (byte as u16) << 8;
    let mut bit = 0;
    while bit < 8 {
        crc = if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 };
        bit += 1;
    }
    crc
}

#[cfg(test)]
mod tests {
    use super::*;

    // The answers of CLUSTER KEYSLOT.
    #[test]
    fn slots_are_those_of_redis() {
        for (key, slot) in [("123456789", 12_739), ("foo", 12_182), ("", 0)] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
        assert_eq!((range_of(b"foo"), range_of(b"")), (1 << (12_182 / 256), 1));
    }
}
