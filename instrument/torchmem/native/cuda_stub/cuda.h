#pragma once
#include "cuda_runtime_api.h"
typedef int CUresult;
typedef unsigned long long CUdeviceptr;
