// The str objects of keys that were decoded before.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace stepmill {

// Keys of infos are the same in every step, so their str objects are kept from call to call, in a table with one place
// per hash. A key that is met a second time is interned, which makes looking it up by a literal a comparison of
// pointers; interning it at first sight would keep keys that never come again for ever (CPython 3.12).
// The GIL guards it. Its references live as long as the process.
class KeyCache {
   public:
    // A new reference to the str for these bytes, or null with an exception set.
    PyObject* get(const char* utf8, std::size_t size) {
        if (size > MAX_KEY_BYTES) return PyUnicode_DecodeUTF8(utf8, static_cast<Py_ssize_t>(size), "surrogatepass");
        Place& place = places_[hash(utf8, size) % places_.size()];
        if (place.key != nullptr && is_same(place.key, utf8, size)) {
            if (!place.is_interned) PyUnicode_InternInPlace(&place.key);
            place.is_interned = true;
            return Py_NewRef(place.key);
        }
        PyObject* key = PyUnicode_DecodeUTF8(utf8, static_cast<Py_ssize_t>(size), "surrogatepass");
        if (key != nullptr && PyUnicode_IS_COMPACT_ASCII(key)) {
            PyObject* old = place.key;
            place = Place{Py_NewRef(key), false};
            Py_XDECREF(old);
        }
        return key;
    }

   private:
    static constexpr std::size_t MAX_KEY_BYTES = 64;

    struct Place {
        PyObject* key;
        bool is_interned;
    };

    static std::size_t hash(const char* utf8, std::size_t size) {
        std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
        for (std::size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<std::uint8_t>(utf8[i])) * 0x100000001b3u;
        return static_cast<std::size_t>(hash ^ hash >> 32);
    }

    static bool is_same(PyObject* key, const char* utf8, std::size_t size) {
        return static_cast<std::size_t>(PyUnicode_GET_LENGTH(key)) == size && std::memcmp(PyUnicode_1BYTE_DATA(key), utf8, size) == 0;
    }

    std::array<Place, 1024> places_{};
};

}  // namespace stepmill
