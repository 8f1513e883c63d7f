// The codec: turns Python values into bytes and back, and keeps the exact Python or NumPy type of each value.
//
// Encoded directly: None, bool, int, float, complex, str, bytes, dict, list, tuple, NumPy scalars, and NumPy arrays of bool, integer,
// float, complex, bytes and str dtypes in any byte order and with any strides. Only these exact types: the pickler encodes subclasses
// and all other objects. The pickler also encodes the whole value if it refers to itself, is nested deeper than CODEC_MAX_DEPTH, or
// has more than CODEC_MAX_NODES parts. Within one process, an object that cannot be pickled is passed by reference, in a list that
// accompanies the bytes.
//
// All functions need the GIL.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stepmill {

inline constexpr int CODEC_MAX_DEPTH = 64;
inline constexpr std::size_t CODEC_MAX_NODES = std::size_t{1} << 20;

// Optional arguments of encode().
struct EncodeContext {
    const char* name = nullptr;     // for errors: "info" makes the TypeError for a part that cannot be pickled name it as info['x']
    PyObject** objects = nullptr;   // receives objects that cannot be pickled: a new list, created when the first one is found; null refuses them
};

// Owns a reference to the pickler, a callable `pickler(obj) -> bytes`. For one thread, with the GIL held.
// Encoding runs Python code only in the pickler.
class Encoder {
   public:
    explicit Encoder(PyObject* pickler);  // adds a reference; with null or None, a value that needs the pickler raises TypeError
    ~Encoder();
    Encoder(const Encoder&) = delete;
    Encoder& operator=(const Encoder&) = delete;
    Encoder(Encoder&& other) noexcept;
    Encoder& operator=(Encoder&&) = delete;

    // Appends the bytes of `obj` to `out`. If it returns false, a Python exception is set and `out` is unchanged.
    [[nodiscard]] bool encode(PyObject* obj, std::vector<std::uint8_t>& out, EncodeContext context = {});

    PyObject* pickler() const { return pickler_; }  // borrowed, for tp_traverse
    bool has_pickled() const { return has_pickled_; }  // the last encode(): equal values have equal bytes only if it has not pickled

   private:
    PyObject* pickler_;
    bool has_pickled_ = false;
};

// The other arguments of decode().
struct DecodeContext {
    PyObject* unpickler = nullptr;  // unpickler(bytes) -> object, borrowed; with null or None, a pickled part raises ValueError
    PyObject* objects = nullptr;    // the list of objects that accompanies the bytes, borrowed; null or None: no objects
};

// Returns a new reference to the object that `data` encodes, or null with a ValueError ("payload ...") or the unpickler's exception
// set. Safe for any bytes: it reads only [data, data + size), allocates at most a small multiple of `size`, nests at most
// CODEC_MAX_DEPTH deep, and passes only pickled parts to the unpickler.
// Arrays own their memory and are writable. Dict keys that occur again are interned.
[[nodiscard]] PyObject* decode(const std::uint8_t* data, std::size_t size, DecodeContext context);

// Decodes up to max_values values that follow each other; returns them as a tuple. Sets `used` to the number of bytes read.
[[nodiscard]] PyObject* decode_values(const std::uint8_t* data, std::size_t size, std::size_t max_values, DecodeContext context, std::size_t& used);

}  // namespace stepmill
