// ML_LAUNCH under a host compiler: the kernel is an ordinary function, called once per thread.
#pragma once

#include <tuple>
#include <utility>

#include "sim/runtime.h"

namespace sim {

// Arguments are converted to the kernel's parameter types once, at the launch, as CUDA does.
template <class... Parameters, class... Arguments>
int launch(const char* name, Site site, void (*kernel)(Parameters...), dim3 grid, dim3 block,
           size_t dynamic_shared_bytes, void* /*stream*/, Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments), "wrong number of kernel arguments");
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  };
  const Call call{kernel, std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)};
  auto body = [](const void* opaque) {
    const Call& call = *static_cast<const Call*>(opaque);
    std::apply(call.kernel, call.arguments);
  };
  return run({name, site, grid, block, dynamic_shared_bytes, body, &call});
}

}  // namespace sim

#define ML_LAUNCH(kernel, grid, block, smem, stream, ...)                                   \
  ::sim::launch(#kernel, ::sim::Site::here(), kernel, grid, block, smem, stream, ##__VA_ARGS__)
