// The codec: Python values to bytes and back, each value keeping its exact Python or NumPy type.
//
// Native: None, bool, int, float, complex, str, bytes, NumPy scalars and arrays of bool, integer, float and complex
// dtypes (arrays also of bytes and str dtypes; any byte order, any strides), dict, list, tuple. Only exact types: a
// subclass, and whatever else there is, goes through the pickler. An object that refers to itself, is nested deeper than
// CODEC_MAX_DEPTH or has more than CODEC_MAX_NODES parts is pickled whole. Within one process, what cannot be pickled is passed by
// reference: it is kept in a list that accompanies the bytes.
//
// Everything here needs the GIL.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stepmill {

inline constexpr int CODEC_MAX_DEPTH = 64;
inline constexpr std::size_t CODEC_MAX_NODES = std::size_t{1} << 20;

// What is encoded, for those who know.
struct EncodeContext {
    const char* name = nullptr;     // "info": a part that cannot be pickled is a TypeError that names it, as info['x']
    PyObject** objects = nullptr;   // takes objects that cannot be pickled: null, or a list (owned), made when it is needed
};

// Owns a reference to the pickler, a callable `pickler(obj) -> bytes`. For one thread, with the GIL held.
// Encoding runs no Python code unless it has to pickle.
class Encoder {
   public:
    explicit Encoder(PyObject* pickler);  // takes a reference of its own; null or None: what needs it is a TypeError
    ~Encoder();
    Encoder(const Encoder&) = delete;
    Encoder& operator=(const Encoder&) = delete;
    Encoder(Encoder&& other) noexcept;
    Encoder& operator=(Encoder&&) = delete;

    // Appends the bytes of `obj` to `out`. False: a Python exception is set, and `out` is as it was.
    [[nodiscard]] bool encode(PyObject* obj, std::vector<std::uint8_t>& out, EncodeContext context = {});

    PyObject* pickler() const { return pickler_; }  // borrowed, for tp_traverse

   private:
    PyObject* pickler_;
};

// What decode() needs beside the bytes.
struct DecodeContext {
    PyObject* unpickler = nullptr;  // unpickler(bytes) -> object, borrowed; null or None refuses pickled parts
    PyObject* objects = nullptr;    // the list of objects that accompanies the bytes, borrowed; null or None: there is none
};

// Returns a new reference to the object that `data` encodes, or null with a ValueError ("payload ...") set, or what the unpickler
// raised. Safe on any bytes: reads only [data, data + size), allocates at most a small multiple of `size`, nests at most
// CODEC_MAX_DEPTH deep. Only a pickled part reaches the unpickler.
// Arrays own their memory and are writable. Keys of dicts that come again are interned.
[[nodiscard]] PyObject* decode(const std::uint8_t* data, std::size_t size, DecodeContext context);

// The same for values that follow each other: a tuple of at most max_values. `used` becomes the bytes that they take.
[[nodiscard]] PyObject* decode_values(const std::uint8_t* data, std::size_t size, std::size_t max_values, DecodeContext context, std::size_t& used);

}  // namespace stepmill
