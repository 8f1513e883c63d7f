// The codec: Python values to bytes and back, each value keeping its exact Python or NumPy type.
//
// Native: None, bool, int, float, complex, str, bytes, NumPy scalars and arrays of bool, integer, float and complex
// dtypes (arrays also of bytes and str dtypes, any byte order, any strides), dict, list, tuple. Only exact types: a
// subclass, and whatever else there is, goes through the pickler. An object that refers to itself, is nested deeper than
// MAX_DEPTH or has more than MAX_NODES parts is pickled whole, so that shared references stay shared.
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

// Owns a reference to the pickler, a callable `pickler(obj) -> bytes`. Used by one thread, with the GIL held.
// Encoding runs no Python code unless it has to pickle.
class Encoder {
 public:
  explicit Encoder(PyObject* pickler);  // borrows, then holds its own reference; may be null: then pickling is a TypeError
  ~Encoder();                           // needs the GIL
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;
  Encoder(Encoder&& other) noexcept;
  Encoder& operator=(Encoder&&) = delete;

  // Append the bytes of `obj` to `out`. False: a Python exception is set and `out` is as it was.
  [[nodiscard]] bool encode(PyObject* obj, std::vector<std::uint8_t>& out);

  PyObject* pickler() const { return pickler_; }  // borrowed, for tp_traverse

 private:
  PyObject* pickler_;
};

// Return a new reference to the object that `data` encodes; null: ValueError ("payload ...") is set. Safe on any bytes:
// never reads outside [data, data + size), never allocates more than a small multiple of `size`, never nests deeper than
// CODEC_MAX_DEPTH. Only a pickled part reaches `unpickler(bytes) -> object` (borrowed; null or None refuses such parts).
// Arrays own their memory and are writable; str keys of dicts are interned.
[[nodiscard]] PyObject* decode(const std::uint8_t* data, std::size_t size, PyObject* unpickler);

}  // namespace stepmill
