// Memory of one thread's work, aligned to cache lines, freed at the end of its scope.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace ml {
namespace ML_ISA {

// Counts first, allocates once: `place` with a null base adds up sizes, then hands out parts.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { std::free(base_); }

  template <class T>
  void place(T*& part, int64_t count) {
    part = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 127) / 64 * 64;
  }
  void allocate() {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(used_) + 64) != 0) throw std::bad_alloc();
    base_ = static_cast<char*>(memory);
    used_ = 0;
  }

 private:
  char* base_ = nullptr;
  int64_t used_ = 0;
};

}  // namespace ML_ISA
}  // namespace ml
