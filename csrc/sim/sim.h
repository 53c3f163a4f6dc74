// CUDA on the CPU: what csrc/device.h includes where the compiler is not nvcc.
//
// Every CUDA thread is a fiber; the blocks of a launch are spread over OS threads. A kernel
// runs as written: whatever it uses that these headers lack is a compile error.
#pragma once

#include "sim/atomics.h"
#include "sim/intrinsics.h"
#include "sim/launch.h"
#include "sim/matrix.h"
#include "sim/memory.h"
#include "sim/types.h"
#include "sim/warp.h"
