// The byte format of the codec, shared by encode.cpp and decode.cpp. The bytes pass only between a pool and its own workers, which run
// the same build on the same machine: native byte order, NumPy type numbers, no version.
//
//   value   tag, then
//     INT            8 bytes, signed                SCALAR  dtype code, the item
//     BIG_INT        text16                         ARRAY   dtype code, swapped (0 or 1), [item bytes, for bytes and str],
//     FLOAT          8 bytes                                ndim, each dimension, the items in C order
//     COMPLEX        16 bytes                       DICT    count, then key and value each
//     STR, KEY       length, UTF-8 (surrogates ok)  LIST    count, values
//     BYTES, PICKLE  length, bytes                  TUPLE   count, values
// OBJECT         its index in the list of objects that accompanies the bytes
//
// Counts, lengths, dimensions and indices are LEB128 varints. KEY is a str that is a dict key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace stepmill {

enum class Tag : std::uint8_t {
    NONE = 'N',
    FALSE = 'F',
    TRUE = 'T',
    INT = 'i',
    BIG_INT = 'I',
    FLOAT = 'f',
    COMPLEX = 'c',
    STR = 's',
    KEY = 'k',
    BYTES = 'b',
    SCALAR = 'g',
    ARRAY = 'a',
    DICT = 'd',
    LIST = 'l',
    TUPLE = 't',
    PICKLE = 'p',
    OBJECT = 'o',
};

inline constexpr std::size_t MAX_VARINT_BYTES = 10;
inline constexpr int MAX_NATIVE_NDIM = 32;  // the smallest NPY_MAXDIMS of the supported NumPy versions

// A NumPy type with items of a fixed size. A scalar object contains one such item.
struct ScalarKind {
    PyTypeObject* type;
    std::uint8_t code;  // NumPy's type number
    std::uint8_t size_bytes;
    std::uint8_t offset;  // of the item in the scalar object
};

inline constexpr std::size_t NUM_SCALAR_KINDS = 18;

// The kinds, most frequent in infos first. NumPy must be imported before the first call.
const std::array<ScalarKind, NUM_SCALAR_KINDS>& scalar_kinds();

// Returns the kind of a NumPy type number; null if the codec does not encode that type directly.
const ScalarKind* scalar_kind_of_code(unsigned code);

}  // namespace stepmill
